// For any processor: four lanes, and registers for 4 x 8 results.
#define ISA portable
#define LANES 4
#define ROWS 4
#define PAIRS 0
#include "forward.hpp"
#include "backward.hpp"
