#include "recode.h"

int baton::recode_plain(const RecodeCall& call) { return recode(call); }
