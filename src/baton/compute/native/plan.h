// Divide a step's attention into items: a pure function from lengths to a list, the longest item first.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

struct AttentionPlan {
    std::vector<AttentionItem> items;   // the most work first
    std::vector<AttentionItem> merges;  // queries whose splits are separate items
    int64_t parts = 0;                  // records of (maximum, sum, output) that items write
    int rows_max = 0;                   // the maximum of queries x grouped heads of an item
    int states_max = 0;                 // the maximum of these x KV heads
};

AttentionPlan plan_attention(const Sizes& sizes, const std::vector<Slice>& slices, int window, int threads);

}  // namespace baton
