#define TABLE AVX512
#include "table.h"
