// What avx512_bf16.cpp does, in instructions that every processor has: slow, and there to be tested everywhere. It is
// taken only where it is asked for by name.
#define ISA pairs
#define LANES 4
#define ROWS 4
#define PAIRS 1
#include "forward.hpp"
#include "backward.hpp"
