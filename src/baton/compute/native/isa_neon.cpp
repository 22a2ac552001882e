#define TABLE NEON
#define BATON_NEON
#include "table.h"
