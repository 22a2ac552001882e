#define TABLE AVX2
#include "table.h"
