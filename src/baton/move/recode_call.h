// One call to convert cells, and its versions for several instruction sets.
#pragma once
#include <cstdint>

namespace baton {

struct RecodeCall {
    const uint8_t* from;
    uint8_t* to;
    int32_t source_format, target_format;  // KVFormat
    int32_t dim;  // numbers of a cell
    const int64_t* geometry;  // loops, cells of a run, then per loop, outermost first: count, distances in both memories
};

int recode_plain(const RecodeCall& call);
int recode_avx2(const RecodeCall& call);
int recode_avx512(const RecodeCall& call);

}  // namespace baton
