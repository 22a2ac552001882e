// FlashAttention over the paged KV blocks of one request, for some of its queries.
// Keys are processed in tiles of 64 and in splits of 256 (split-K), both at fixed absolute positions. Each split has
// its own softmax state (running maximum, sum and output), and splits are merged in order. A masked key has weight 0
// and changes no bit.
// Source: online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135, section 3; split-K: Flash-Decoding.
#pragma once
#include "gemm.h"
#include "attention_unpacked.h"
#include "rows.h"

namespace baton {
namespace {

constexpr int BLOCK_ROWS = 112;  // rows of an item whose scores fit into the first-level cache
constexpr float LOG2_E = 1.44269504f;
#if defined(BATON_AMX)
constexpr int PRODUCTS_STEP = PANEL;
#else
constexpr int PRODUCTS_STEP = 2;
#endif

// One thread's scratch memory for one work item, in one buffer. rows: queries x query heads of a KV head;
// states: softmax states, rows x KV heads.
struct AttentionScratch {
    float *scores, *weights, *maximum, *total, *out, *merged_maximum, *merged_total, *merged_out, *keys, *values, *tile,
        *rescale;

    static int64_t floats(const Sizes& s, int rows, int states) {
        const int64_t pad = s.head_pad(), value_pad = s.value_pad();
        return block_rows(rows) * (2 * TILE_KEYS + 1) + states * (4 + 2 * value_pad) +
               TILE_KEYS * (2 * pad + value_pad) + 16 * PIECES;
    }
    AttentionScratch(float* memory, const Sizes& s, int rows, int states) : next_(memory) {
        const int64_t pad = s.head_pad(), value_pad = s.value_pad();
        scores = allocate(block_rows(rows) * TILE_KEYS), weights = allocate(block_rows(rows) * TILE_KEYS);
        maximum = allocate(states), total = allocate(states), out = allocate(states * value_pad);
        merged_maximum = allocate(states), merged_total = allocate(states), merged_out = allocate(states * value_pad);
        keys = allocate(TILE_KEYS * pad), values = allocate(TILE_KEYS * value_pad), tile = allocate(TILE_KEYS * pad);
        rescale = allocate(block_rows(rows));
    }

private:
    static constexpr int PIECES = 12;
    float* next_;

    static int block_rows(int rows) { return rows < BLOCK_ROWS ? rows : BLOCK_ROWS; }

    float* allocate(int64_t count) {
        float* piece = next_;
        next_ += (count + 15) / 16 * 16;
        return piece;
    }
};

// Find the rows of a tile's keys (plane 0) or values (1) for one head, and convert them to the type of the GEMM if they
// have another. Rows behind the end of the context are zero.
template <class Element>
inline void load_tile_rows(const Attention& call, const KVTile& tile, int plane, int head, Element* copies,
                           const void** rows) {
    alignas(64) static const float zero_row[HEAD_DIM_MAX] = {};
    const Sizes& sizes = *call.sizes;
    const DType kv_dtype = call.arena->dtype, dtype = sizeof(Element) == 2 ? DType::BF16 : DType::F32;
    const bool in_place = kv_dtype == dtype && sizes.head_dim == sizes.head_pad();
    const int64_t offset = plane * tile.plane_bytes + head * kv_head_bytes(kv_dtype, sizes.head_dim);
    for (int key = 0; key < TILE_KEYS; key++) rows[key] = key < tile.valid ? tile.keys[key] + offset : nullptr;
    for (int key = tile.valid; key < TILE_KEYS; key++) rows[key] = zero_row;
    if (in_place) return;
    float row[HEAD_DIM_MAX] = {};
    for (int key = 0; key < tile.valid; key++) {
        load_kv_head(kv_dtype, rows[key], row, sizes.head_dim);
        Element* copy = copies + int64_t{key} * sizes.head_pad();
        store_row(copy, row, sizes.head_pad());
        rows[key] = copy;
    }
}

// ---- one tile ----------------------------------------------------------------------------------------------------

// The keys that the queries of an item see in a tile: those of query i are [from(i), to(i)).
struct VisibleKeys {
    int position, window;  // position: of the first query, from the tile's first key

    int from(int query) const { return window == 0 ? 0 : to(query) - window; }
    int to(int query) const { return position + query + 1; }
    int first_query() const { return position < 0 ? -position : 0; }  // the first that sees any key
};

// Scores of vector `at` of a row. MASKED: only [from, to) are visible.
template <bool MASKED>
inline Vec visible_scores(const float* row, int at, int from, int to) {
    const Vec scores = load(row + at);
    return MASKED && (from > at || to < at + LANES) ? keep_lanes(scores, from - at, to - at, -INFINITY) : scores;
}

// The rows of a tile that go through softmax and products together: their scores and weights stay in the first-level
// cache. `state`: of the first row.
struct TileRows {
    int first, count, group;
    float *maximum, *total, *rescale;
};

// Turn scores [rows][TILE_KEYS] into softmax weights, and update the rows' states. A masked key has weight 0, and a
// visible score that is NaN makes the state NaN. Maxima are logarithms to base 2, as is `scale`.
// rescale [rows]: the factors for the output of earlier tiles. Rows go through each stage together, because one row's
// stages depend on each other, and a core would wait for the results.
template <bool MASKED, class Element>
inline void online_softmax(const float* scores, Element* weights, const TileRows& rows, int keys,
                           const VisibleKeys& visible, float scale) {
    for (int first = 0; first < rows.count; first += LANES) {
        const int count = rows.count - first < LANES ? rows.count - first : LANES;
        int begin[LANES], from[LANES], to[LANES], end[LANES];  // begin, end: of whole vectors
        int query = (rows.first + first) / rows.group, member = (rows.first + first) % rows.group;
        Vec lanes[LANES];
        for (int i = 0; i < count; i++) {
            from[i] = visible.from(query), to[i] = visible.to(query);
            end[i] = !MASKED || to[i] >= keys ? keys : to[i] <= 0 ? 0 : padded(to[i], LANES);
            begin[i] = !MASKED || from[i] <= 0 ? 0 : from[i] < end[i] ? from[i] / LANES * LANES : end[i];
            if (++member == rows.group) member = 0, query++;
            lanes[i] = broadcast(EMPTY_MAXIMUM);
            const float* row = scores + (first + i) * TILE_KEYS;
            for (int key = begin[i]; key < end[i]; key += LANES)
                lanes[i] = baton::maximum(visible_scores<MASKED>(row, key, from[i], to[i]), lanes[i]);
        }
        float tops[LANES] = {}, totals[LANES] = {};
        std::memcpy(tops, rows.maximum + first, size_t(count) * 4);
        std::memcpy(totals, rows.total + first, size_t(count) * 4);
        const Vec before = load(tops);
        const Vec top = baton::maximum(mul(reduce_rows(lanes, count, Maximum()), broadcast(scale)), before);
        const Vec factors = power_of_two(sub(before, top));  // exactly 1 where the maximum stays
        store(tops, top);
        for (int i = 0; i < count; i++) {
            const float* row = scores + (first + i) * TILE_KEYS;
            Element* out = weights + (first + i) * TILE_KEYS;
            const Vec highest = broadcast(tops[i]);
            Vec sums = zero();
            for (int key = 0; key < begin[i]; key += LANES) store(out + key, zero());
            for (int key = begin[i]; key < end[i]; key += LANES) {
                const Vec score = mul(visible_scores<MASKED>(row, key, from[i], to[i]), broadcast(scale));
                const Vec weight = power_of_two(sub(score, highest));
                sums = add(sums, weight);
                store(out + key, weight);
            }
            for (int key = end[i]; key < keys; key += LANES) store(out + key, zero());
            lanes[i] = sums;
        }
        const Vec total = add(mul(load(totals), factors), reduce_rows(lanes, count, Sum()));
        float factor[LANES];
        store(factor, factors), store(totals, total);
        std::memcpy(rows.maximum + first, tops, size_t(count) * 4);
        std::memcpy(rows.total + first, totals, size_t(count) * 4);
        std::memcpy(rows.rescale + first, factor, size_t(count) * 4);
    }
}

template <class Element>
inline void online_softmax(const float* scores, Element* weights, const TileRows& rows, int keys,
                           const VisibleKeys& visible, float scale) {
    const int last = (rows.first + rows.count - 1) / rows.group;
    if (visible.from(last) <= 0 && visible.to(rows.first / rows.group) >= keys)
        online_softmax<false>(scores, weights, rows, keys, visible, scale);
    else online_softmax<true>(scores, weights, rows, keys, visible, scale);
}

inline void scale_row(float* row, int count, float factor) {
    if (factor == 1.0f) return;
    for (int i = 0; i < count; i += LANES) store(row + i, mul(load(row + i), broadcast(factor)));
}

// scores[rows][keys] = rows of q x packed keys. A panel of keys skips the rows that see none of them.
template <class In>
inline void score_packed(const typename In::Element* q, const TileRows& rows, int pad, int keys,
                         const VisibleKeys& visible, const typename In::Element* panels, float* scores) {
    NoPrefetcher none;
    for (int key = 0; key < keys; key += PANEL) {
        const int hidden = (key - visible.position) * rows.group - rows.first, skip = hidden > 0 ? hidden : 0;
        if (skip >= rows.count) break;
        for_row_tiles<In>(rows.count - skip, [&](int row, int count) {
            multiply<In, false>(count, q + int64_t{skip + row} * pad, pad, panels + int64_t{key} * pad, pad,
                                scores + (skip + row) * TILE_KEYS + key, TILE_KEYS, none);
        });
    }
}

// out[rows][pad] += weights[rows][keys] x packed values. A tile of rows skips the keys that none of them sees.
template <class In>
inline void accumulate_packed(const typename In::Element* weights, const TileRows& rows, int pad, int keys,
                              const VisibleKeys& visible, const typename In::Element* panels, float* out) {
    NoPrefetcher none;
    for (int dim = 0; dim < pad; dim += PANEL)
        for_row_tiles<In>(rows.count, [&](int row, int count) {
            const int seen = padded(visible.to((rows.first + row + count - 1) / rows.group), PRODUCTS_STEP);
            multiply<In, true>(count, weights + row * TILE_KEYS, TILE_KEYS, panels + int64_t{dim} * TILE_KEYS,
                               seen < keys ? seen : keys, out + int64_t{row} * pad + dim, pad, none);
        });
}

// Add a tile to the softmax states of one head, which begin at `state`.
template <class In>
inline void attend_tile(const Attention& call, const AttentionItem& item, int head, const KVTile& tile, int state,
                        AttentionScratch& scratch, TilePrefetcher& prefetcher) {
    using Element = typename In::Element;
    const Sizes& sizes = *call.sizes;
    const Slice& slice = call.slices[item.slice];
    const int pad = sizes.head_pad(), value_pad = sizes.value_pad(), group = sizes.group(), rows = item.count * group;
    const int keys = padded(tile.valid, PANEL);
    const VisibleKeys visible{slice.start + item.query - tile.first_key, call.window};
    const void* tile_rows[TILE_KEYS];
    Element *copies = reinterpret_cast<Element*>(scratch.tile), *weights = reinterpret_cast<Element*>(scratch.weights);
    const Element* q =
        static_cast<const Element*>(call.queries.data) + call.queries.at(sizes, head, slice.first + item.query);
    const auto block_of = [&](int first, int count) {
        return TileRows{first, count, group, scratch.maximum + state + first, scratch.total + state + first,
                        scratch.rescale};
    };
    // Values outside of the attention window have weight 0 but may be NaN: read the first visible value instead.
    const auto load_values = [&] {
        if (tile.plane_bytes != 0) load_tile_rows(call, tile, 1, head, copies, tile_rows);
        const int first_visible = visible.from(0);
        for (int key = 0; key < first_visible; key++) tile_rows[key] = tile_rows[first_visible];
    };
    const auto rescale = [&](float* out, int count) {
        for (int row = 0; row < count; row++)
            scale_row(out + int64_t{row} * value_pad, value_pad, scratch.rescale[row]);
    };
    load_tile_rows(call, tile, 0, head, copies, tile_rows);
#if defined(__AVX512F__) || defined(__AVX2__) || defined(BATON_NEON)
    if (is_unpacked<In>(rows)) {
        float* out = scratch.out + int64_t{state} * value_pad;
        score_unpacked<In>(rows, q, pad / In::K_STEP, tile_rows, keys, scratch.scores, prefetcher);
        online_softmax(scratch.scores, weights, block_of(0, rows), keys, visible, call.scale * LOG2_E);
        rescale(out, rows);
        load_values();
        return accumulate_unpacked<In>(rows, weights, tile_rows, keys, out, value_pad, prefetcher);
    }
#endif
    Element *key_panels = reinterpret_cast<Element*>(scratch.keys),
            *value_panels = reinterpret_cast<Element*>(scratch.values);
    pack_keys(tile_rows, pad / In::K_STEP, keys, reinterpret_cast<uint32_t*>(key_panels));
    load_values();
    pack_values(tile_rows, value_pad, keys, value_panels);
    const int first_row = visible.first_query() * group, blocks = tile_count(rows - first_row, BLOCK_ROWS);
    for (int block = 0; block < blocks; block++) {
        const int first = first_row + (rows - first_row) * block / blocks;
        const TileRows some = block_of(first, first_row + (rows - first_row) * (block + 1) / blocks - first);
        float* out = scratch.out + int64_t{state + first} * value_pad;
        prefetcher.prefetch_portion(blocks);
        score_packed<In>(q + int64_t{first} * pad, some, pad, keys, visible, key_panels, scratch.scores);
        online_softmax(scratch.scores, weights, some, keys, visible, call.scale * LOG2_E);
        rescale(out, some.count);
        accumulate_packed<In>(weights, some, value_pad, keys, visible, value_panels, out);
    }
}

// ---- splits and their merge --------------------------------------------------------------------------------------

// Merge a split's softmax state into that of earlier splits. The first split is copied exactly.
inline void merge_state(float* maximum, float* total, float* out, float split_maximum, float split_total,
                        const float* split_out, int count) {
    const float now = split_maximum > *maximum ? split_maximum : *maximum;
    const float old_weight = power_of_two_of(*maximum - now), split_weight = power_of_two_of(split_maximum - now);
    for (int i = 0; i < count; i += LANES)
        store(out + i, fma(load(split_out + i), broadcast(split_weight), mul(load(out + i), broadcast(old_weight))));
    *total = *total * old_weight + split_total * split_weight;
    *maximum = now;
}

inline void clear_state(float* maximum, float* total, float* out, int rows, int pad) {
    for (int row = 0; row < rows; row++) maximum[row] = EMPTY_MAXIMUM, total[row] = 0.0f;
    std::memset(out, 0, size_t(rows) * pad * 4);
}

// Return the first key of a split that any query of the item attends to, rounded down to its tile.
inline int first_tile(const Attention& call, const AttentionItem& item, int split) {
    const int query = call.slices[item.slice].start + item.query, key = split * SPLIT_KEYS;
    const int visible_from = call.window == 0 || query < call.window ? 0 : query - call.window + 1;
    return key >= visible_from ? key : visible_from / TILE_KEYS * TILE_KEYS;
}

// Return one past the last key that any query of the item attends to.
inline int keys_end(const Attention& call, const AttentionItem& item) {
    return call.slices[item.slice].start + item.query + item.count;
}

// Locate the tile after the one at `key`, to prefetch it: of this item, else the first of the next item. Return the
// item that it belongs to, or null.
inline const AttentionItem* next_tile(const Attention& call, const AttentionItem& item, int key,
                                      const AttentionItem* next, KVTile& tile) {
    const int after = key + TILE_KEYS;
    const bool more = after < keys_end(call, item) && after < item.split_end * SPLIT_KEYS;
    const AttentionItem* upcoming_item = more ? &item : next;
    if (upcoming_item == nullptr) return nullptr;
    tile.locate(call, call.slices[upcoming_item->slice],
                more ? after : first_tile(call, *upcoming_item, upcoming_item->split), keys_end(call, *upcoming_item));
    return upcoming_item;
}

// Compute one split for all heads of the item, into scratch.maximum, total and out.
template <class In>
inline void attend_split(const Attention& call, const AttentionItem& item, int split, const AttentionItem* next,
                         AttentionScratch& scratch) {
    const int rows = item.count * call.sizes->group(), heads = item.head_end - item.head;
    const int end = keys_end(call, item), first = first_tile(call, item, split);
    const int split_end = (split + 1) * SPLIT_KEYS < end ? (split + 1) * SPLIT_KEYS : end;
    const int64_t head_bytes = call.arena->token_bytes / call.sizes->kv_heads;
    KVTile tiles[2];
    int current = 0;
    tiles[current].locate(call, call.slices[item.slice], first, end);
    clear_state(scratch.maximum, scratch.total, scratch.out, rows * heads, call.sizes->value_pad());
    for (int key = first; key < split_end; key += TILE_KEYS, current = 1 - current) {
        KVTile& upcoming = tiles[1 - current];
        const AttentionItem* upcoming_item = next_tile(call, item, key, next, upcoming);
        TilePrefetcher prefetcher = upcoming_item == nullptr
                                        ? TilePrefetcher(nullptr, 0, 0, heads)
                                        : TilePrefetcher(&upcoming, upcoming_item->head * head_bytes,
                                                         upcoming_item->head_end * head_bytes, heads);
        for (int head = item.head; head < item.head_end; head++)
            attend_tile<In>(call, item, head, tiles[current], (head - item.head) * rows, scratch, prefetcher);
    }
}

inline void write_head(const Attention& call, int token, int head, const float* out, float total) {
    const int dim = call.sizes->value_dim();
    float row[HEAD_DIM_MAX];
    const float factor = 1.0f / total;
    for (int i = 0; i < dim; i++) row[i] = out[i] * factor;
    store_row(call.out_dtype, call.out.data, token * call.out.stride + int64_t{head} * call.out_dim, row, dim);
}

// Write one head's merged state: normalized to the output, or as a partial result for merge_partials().
inline void write_rows(const Attention& call, const AttentionItem& item, int head, int state,
                       const AttentionScratch& scratch) {
    const int group = call.sizes->group(), pad = call.sizes->value_pad(), rows = item.count * group;
    for (int row = 0; row < rows; row++) {
        const float* out = scratch.merged_out + int64_t{state + row} * pad;
        if (item.partial == NO_PARTIAL) {
            const int token = call.slices[item.slice].first + item.query + row / group;
            write_head(call, token, head * group + row % group, out, scratch.merged_total[state + row]);
        } else {
            float* partial = call.partials + (int64_t{item.partial} + head * rows + row) * (2 + pad);
            partial[0] = scratch.merged_maximum[state + row], partial[1] = scratch.merged_total[state + row];
            std::memcpy(partial + 2, out, size_t(pad) * 4);
        }
    }
}

template <class In>
inline void attend_item(const Attention& call, const AttentionItem& item, const AttentionItem* next,
                        AttentionScratch& scratch) {
    const int pad = call.sizes->value_pad(), rows = item.count * call.sizes->group();
    const int states = rows * (item.head_end - item.head);
    clear_state(scratch.merged_maximum, scratch.merged_total, scratch.merged_out, states, pad);
    for (int split = item.split; split < item.split_end; split++) {
        attend_split<In>(call, item, split, next, scratch);
        for (int state = 0; state < states; state++)
            merge_state(scratch.merged_maximum + state, scratch.merged_total + state,
                        scratch.merged_out + int64_t{state} * pad, scratch.maximum[state], scratch.total[state],
                        scratch.out + int64_t{state} * pad, pad);
    }
    for (int head = item.head; head < item.head_end; head++)
        write_rows(call, item, head, (head - item.head) * rows, scratch);
}

void attend(const Attention& call, const AttentionItem& item, const AttentionItem* next, float* memory) {
    const int rows = item.count * call.sizes->group();
    AttentionScratch scratch(memory, *call.sizes, rows, rows * (item.head_end - item.head));
    if (call.queries.dtype == DType::BF16) attend_item<InBF16>(call, item, next, scratch);
    else attend_item<InF32>(call, item, next, scratch);
}

// Merge the partial results of queries whose splits are separate items: [split][kv_head][row], from item.partial.
void merge_partials(const Attention& call, const AttentionItem& item, float* memory) {
    const int group = call.sizes->group(), pad = call.sizes->value_pad(), rows = item.count * group;
    const int64_t record = 2 + pad;
    for (int head = item.head; head < item.head_end; head++)
        for (int row = 0; row < rows; row++) {
            float maximum, total;
            clear_state(&maximum, &total, memory, 1, pad);
            for (int split = item.split; split < item.split_end; split++) {
                const int64_t at =
                    item.partial + (int64_t{split - item.split} * call.sizes->kv_heads + head) * rows + row;
                const float* partial = call.partials + at * record;
                merge_state(&maximum, &total, memory, partial[0], partial[1], partial + 2, pad);
            }
            const int token = call.slices[item.slice].first + item.query + row / group;
            write_head(call, token, head * group + row % group, memory, total);
        }
}

}  // namespace
}  // namespace baton
