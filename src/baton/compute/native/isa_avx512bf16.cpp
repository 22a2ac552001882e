#define TABLE AVX512BF16
#include "table.h"
