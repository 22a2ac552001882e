#define TABLE AMX
#define BATON_AMX
#include "table.h"
