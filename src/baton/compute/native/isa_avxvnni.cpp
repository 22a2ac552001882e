#define TABLE AVXVNNI
#include "table.h"
