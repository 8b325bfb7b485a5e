// AVX-512: sixteen lanes, and registers for 12 x 32 results. Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq.
#define ISA avx512
#define LANES 16
#define ROWS 12
#define PAIRS 0
#include "forward.hpp"
#include "backward.hpp"
