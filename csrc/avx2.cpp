// AVX2 with FMA: eight lanes, and registers for 6 x 16 results. Compiled with -mavx2 -mfma -mf16c.
#define ISA avx2
#define LANES 8
#define ROWS 6
#define PAIRS 0
#include "forward.hpp"
#include "backward.hpp"
