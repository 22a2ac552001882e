#define TABLE NEON_DOT
#define BATON_NEON
#include "table.h"
