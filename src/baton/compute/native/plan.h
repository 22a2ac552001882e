// Divide a step's attention into work items: a pure function from lengths to a list, longest processing time first.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

struct AttentionPlan {
    std::vector<AttentionItem> items;   // the most work first
    std::vector<AttentionItem> merges;  // queries whose splits are separate items
    int64_t partials = 0;               // softmax states that items write for merge_partials()
    int rows_max = 0;                   // the maximum of queries x query heads of a KV head in an item
    int states_max = 0;                 // the maximum of these x KV heads
};

AttentionPlan plan_attention(const Sizes& sizes, const std::vector<Slice>& slices, int window, int threads);

}  // namespace baton
