#define TABLE PLAIN
#include "table.h"
