// How a step's attention is cut into items. Pure: from lengths to a list, the longest first.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

struct AttentionPlan {
    std::vector<AttentionItem> items;   // to attend, the most work first
    std::vector<AttentionItem> merges;  // queries whose splits were shared out
    int64_t parts = 0;                  // records of (maximum, sum, output) that the items leave
    int rows_max = 0;                   // most queries x grouped heads of an item
    int states_max = 0;                 // most of these x KV heads
};

AttentionPlan plan_attention(const Sizes& sizes, const std::vector<Slice>& slices, int window, int threads);

}  // namespace baton
