#include "plan.h"

#include <algorithm>

namespace baton {
namespace {

constexpr int ITEM_ROWS = 96;          // queries x query heads of a KV head that share one pass over the keys
constexpr int LARGE_ITEM_ROWS = 384;   // the same for long prompts: their keys are packed less often
constexpr int MEMORY_BOUND_ROWS = 24;  // up to here reading KV takes the time, so splits may be separate items
constexpr int ITEMS_PER_THREAD = 4;    // enough for load balance at the end of a layer

struct QueryBlock {  // some queries of one slice
    int slice, query, count, split, split_end;
};

std::vector<QueryBlock> block_queries(const std::vector<Slice>& slices, int window, int queries_max) {
    std::vector<QueryBlock> blocks;
    for (int slice = 0; slice < int(slices.size()); slice++) {
        const Slice& s = slices[size_t(slice)];
        for (int query = 0; query < s.count; query += queries_max) {
            const int count = std::min(queries_max, s.count - query), first = s.start + query;
            const int from = window == 0 || first < window ? 0 : first - window + 1;
            blocks.push_back({slice, query, count, from / SPLIT_KEYS, (first + count - 1) / SPLIT_KEYS + 1});
        }
    }
    return blocks;
}

// Return the queries of an item: many, if there are enough such items to keep all threads busy to the end.
int queries_per_item(const Sizes& sizes, const std::vector<Slice>& slices, int threads) {
    const int few = std::max(1, ITEM_ROWS / sizes.group()), many = std::max(1, LARGE_ITEM_ROWS / sizes.group());
    int64_t items = 0;
    for (const Slice& s : slices)
        if (s.count > few) items += int64_t{(s.count + many - 1) / many} * sizes.kv_heads;
    return items >= int64_t{2 * ITEMS_PER_THREAD} * threads ? many : few;
}

int64_t cost(const AttentionItem& item) {
    return int64_t{item.split_end - item.split} * (item.head_end - item.head) * (item.count + 8);
}

}  // namespace

AttentionPlan plan_attention(const Sizes& sizes, const std::vector<Slice>& slices, int window, int threads) {
    AttentionPlan plan;
    const int group = sizes.group(), queries_max = queries_per_item(sizes, slices, threads);
    const std::vector<QueryBlock> blocks = block_queries(slices, window, queries_max);
    const bool has_few_items = threads > 1 && int64_t(blocks.size()) < int64_t{ITEMS_PER_THREAD} * threads;
    for (const QueryBlock& b : blocks) {
        const int rows = b.count * group;
        plan.rows_max = std::max(plan.rows_max, rows);
        // Latent attention has many query rows and one KV head, so only queries can be divided.
        const bool is_split =
            has_few_items && (rows <= MEMORY_BOUND_ROWS || sizes.kv_heads == 1) && b.split_end - b.split > 1;
        const bool by_head = has_few_items || rows > MEMORY_BOUND_ROWS;
        const int heads = by_head ? 1 : sizes.kv_heads, splits = is_split ? 1 : b.split_end - b.split;
        plan.states_max = std::max(plan.states_max, rows * heads);
        for (int head = 0; head < sizes.kv_heads; head += heads)
            for (int split = b.split; split < b.split_end; split += splits) {
                const int64_t record = plan.partials + int64_t{split - b.split} * sizes.kv_heads * rows;
                plan.items.push_back({b.slice, b.query, b.count, head, head + heads, split, split + splits,
                                      is_split ? int(record) : NO_PARTIAL});
            }
        if (!is_split) continue;
        plan.merges.push_back({b.slice, b.query, b.count, 0, sizes.kv_heads, b.split, b.split_end, int(plan.partials)});
        plan.partials += int64_t{b.split_end - b.split} * sizes.kv_heads * rows;
    }
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    return plan;
}

}  // namespace baton
