#include "recode.h"

int baton::recode_avx2(const RecodeCall& call) { return recode(call); }
