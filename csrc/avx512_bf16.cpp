// AVX-512 with products of bfloat16. Compiled with the flags of avx512.cpp and -mavx512bf16.
#define ISA avx512_bf16
#define LANES 16
#define ROWS 12
#define PAIRS 1
#include "forward.hpp"
#include "backward.hpp"
