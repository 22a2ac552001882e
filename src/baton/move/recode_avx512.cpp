#include "recode.h"

int baton::recode_avx512(const RecodeCall& call) { return recode(call); }
