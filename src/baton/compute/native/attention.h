// Attention of a few queries over the KV blocks of one request.
// Keys are computed in tiles of 64 and splits of 256, both at fixed absolute positions. A split has its own running
// maximum, sum and output; splits are merged in order. A key that a query does not see has weight 0 and changes no bit.
// Source: online softmax, arXiv 1805.02867; tiles and the merge by log-sum-exp, arXiv 2205.14135, section 3.
#pragma once
#include "gemm.h"
#include "lone.h"
#include "rows.h"

namespace baton {
namespace {

// Scratch memory of one thread for one item, in one buffer. rows: queries x grouped heads; states: rows x KV heads.
struct Work {
    float *scores, *weights, *maximum, *total, *out, *all_maximum, *all_total, *all_out, *keys, *values, *tile;

    static int64_t floats(const Sizes& s, int rows, int states) {
        const int64_t pad = s.head_pad(), value_pad = s.value_pad();
        return rows * 2 * TILE_KEYS + states * (4 + 2 * value_pad) + TILE_KEYS * (2 * pad + value_pad) + 16 * PIECES;
    }
    Work(float* memory, const Sizes& s, int rows, int states) : end(memory) {
        const int64_t pad = s.head_pad(), value_pad = s.value_pad();
        scores = take(rows * TILE_KEYS), weights = take(rows * TILE_KEYS);
        maximum = take(states), total = take(states), out = take(states * value_pad);
        all_maximum = take(states), all_total = take(states), all_out = take(states * value_pad);
        keys = take(TILE_KEYS * pad), values = take(TILE_KEYS * value_pad), tile = take(TILE_KEYS * pad);
    }

private:
    static constexpr int PIECES = 11;
    float* end;

    float* take(int64_t count) {
        float* piece = end;
        end += (count + 15) / 16 * 16;
        return piece;
    }
};

// The rows of a tile's keys (plane 0) or values (1) for one head, in the type of products. Missing rows are zero.
template <class Cell>
inline void tile_rows(const Attention& call, const Tile& tile, int plane, int head, Cell* copies, const void** rows) {
    alignas(64) static const float nothing[HEAD_DIM_MAX] = {};
    const Sizes& sizes = *call.sizes;
    const Number kv_number = call.arena->number, number = sizeof(Cell) == 2 ? Number::BF16 : Number::F32;
    const bool in_place = kv_number == number && sizes.head_dim == sizes.head_pad();
    const int64_t offset = plane * tile.plane_bytes + head * kv_head_bytes(kv_number, sizes.head_dim);
    for (int key = 0; key < TILE_KEYS; key++) rows[key] = key < tile.valid ? tile.keys[key] + offset : nullptr;
    for (int key = tile.valid; key < TILE_KEYS; key++) rows[key] = nothing;
    if (in_place) return;
    float row[HEAD_DIM_MAX] = {};
    for (int key = 0; key < tile.valid; key++) {
        load_kv_head(kv_number, rows[key], row, sizes.head_dim);
        Cell* copy = copies + int64_t{key} * sizes.head_pad();
        store_row(copy, row, sizes.head_pad());
        rows[key] = copy;
    }
}

// ---- one tile ----------------------------------------------------------------------------------------------------

// Turn a row of scores into weights. Keys outside [from, to) get weight 0. Return the factor on earlier sums.
template <class Cell>
inline float soften(float* scores, Cell* weights, int keys, int from, int to, float scale, float* maximum,
                    float* total) {
    Vec top = all(NOTHING_SEEN);
    for (int i = 0; i < keys; i += LANES) {
        Vec score = mul(load(scores + i), all(scale));
        if (from > i || to < i + LANES) score = keep_lanes(score, from - i, to - i, -INFINITY);
        store(scores + i, score);
        top = baton::maximum(top, score);
    }
    const float before = *maximum, highest = largest(top);
    const float now = highest > before ? highest : before;
    Vec sums = zero();
    for (int i = 0; i < keys; i += LANES) {
        const Vec weight = exponential(sub(load(scores + i), all(now)));
        sums = add(sums, weight);
        store(weights + i, weight);
    }
    const float shrink = now == before ? 1.0f : exponential_of(before - now);
    *maximum = now;
    *total = *total * shrink + sum(sums);
    return shrink;
}

inline void scale_row(float* row, int count, float factor) {
    if (factor == 1.0f) return;
    for (int i = 0; i < count; i += LANES) store(row + i, mul(load(row + i), all(factor)));
}

// work.scores[rows][keys] = the queries of one head x the tile's keys.
template <class In>
inline void score(const typename In::Cell* q, int rows, int pad, const void* const* found, int keys, Work& work,
                  Prefetch& next) {
    using Cell = typename In::Cell;
#if defined(__AVX512F__)
    if (is_lone<In>(rows)) return score_lone<In>(rows, q, pad / In::STEP, found, keys, work.scores, next);
#endif
    Cell* panels = reinterpret_cast<Cell*>(work.keys);
    next.part(4);
    pack_keys(found, pad / In::STEP, keys, reinterpret_cast<uint32_t*>(panels));
    next.part(4);
    for (int key = 0; key < keys; key += PANEL)
        for_row_tiles<In>(rows, [&](int row, int count) {
            multiply<In, false>(count, q + int64_t{row} * pad, pad, panels + int64_t{key} * pad, pad,
                                work.scores + row * TILE_KEYS + key, TILE_KEYS);
        });
}

// out[rows][pad] += weights[rows][keys] x the tile's values.
template <class In>
inline void weigh(const typename In::Cell* weights, int rows, int pad, const void* const* found, int keys, float* out,
                  Work& work, Prefetch& next) {
    using Cell = typename In::Cell;
#if defined(__AVX512F__)
    if (is_lone<In>(rows)) return weigh_lone<In>(rows, weights, found, keys, out, pad, next);
#endif
    Cell* panels = reinterpret_cast<Cell*>(work.values);
    next.part(4);
    pack_values(found, pad, keys, panels);
    next.part(4);
    for (int dim = 0; dim < pad; dim += PANEL)
        for_row_tiles<In>(rows, [&](int row, int count) {
            multiply<In, true>(count, weights + row * TILE_KEYS, TILE_KEYS, panels + int64_t{dim} * TILE_KEYS, keys,
                               out + int64_t{row} * pad + dim, pad);
        });
}

// Add a tile to the sums of one head, which begin at `state`.
template <class In>
inline void attend_tile(const Attention& call, const AttentionItem& item, int head, const Tile& tile, int state,
                        Work& work, Prefetch& next) {
    using Cell = typename In::Cell;
    const Sizes& sizes = *call.sizes;
    const Slice& slice = call.slices[item.slice];
    const int pad = sizes.head_pad(), value_pad = sizes.value_pad(), group = sizes.group(), rows = item.count * group;
    const int keys = padded(tile.valid, PANEL);
    const void* found[TILE_KEYS];
    Cell *copies = reinterpret_cast<Cell*>(work.tile), *weights = reinterpret_cast<Cell*>(work.weights);
    float* out = work.out + int64_t{state} * value_pad;
    const Cell* q = static_cast<const Cell*>(call.queries.data) + call.queries.at(sizes, head, slice.first + item.query);
    tile_rows(call, tile, 0, head, copies, found);
    score<In>(q, rows, pad, found, keys, work, next);
    for (int row = 0; row < rows; row++) {
        const int position = slice.start + item.query + row / group - tile.first_key;
        const int from = call.window == 0 ? 0 : position - call.window + 1;
        const float shrink = soften(work.scores + row * TILE_KEYS, weights + row * TILE_KEYS, keys, from, position + 1,
                                    call.scale, work.maximum + state + row, work.total + state + row);
        scale_row(out + int64_t{row} * value_pad, value_pad, shrink);
    }
    if (tile.plane_bytes != 0) tile_rows(call, tile, 1, head, copies, found);
    // Values behind the window have weight 0 but may be NaN, so the first visible value is read instead of them.
    const int seen = call.window == 0 ? 0 : slice.start + item.query - call.window + 1 - tile.first_key;
    for (int key = 0; key < seen; key++) found[key] = found[seen];
    weigh<In>(weights, rows, value_pad, found, keys, out, work, next);
}

// ---- splits and their merge --------------------------------------------------------------------------------------

// Merge a split's (maximum, total, out) into the sums of earlier splits. The first split is copied exactly.
inline void merge(float* maximum, float* total, float* out, float part_maximum, float part_total,
                  const float* part_out, int count) {
    const float now = part_maximum > *maximum ? part_maximum : *maximum;
    const float old_weight = exponential_of(*maximum - now), part_weight = exponential_of(part_maximum - now);
    for (int i = 0; i < count; i += LANES)
        store(out + i, fma(load(part_out + i), all(part_weight), mul(load(out + i), all(old_weight))));
    *total = *total * old_weight + part_total * part_weight;
    *maximum = now;
}

inline void forget(float* maximum, float* total, float* out, int rows, int pad) {
    for (int row = 0; row < rows; row++) maximum[row] = NOTHING_SEEN, total[row] = 0.0f;
    std::memset(out, 0, size_t(rows) * pad * 4);
}

// The first key of a split that any query of the item sees, rounded down to its tile.
inline int first_tile(const Attention& call, const AttentionItem& item, int split) {
    const int query = call.slices[item.slice].start + item.query, key = split * SPLIT_KEYS;
    const int seen_from = call.window == 0 || query < call.window ? 0 : query - call.window + 1;
    return key >= seen_from ? key : seen_from / TILE_KEYS * TILE_KEYS;
}

// One past the last key that any query of the item sees.
inline int end_of(const Attention& call, const AttentionItem& item) {
    return call.slices[item.slice].start + item.query + item.count;
}

// Find the tile after the one at `key`: of this item, else the first of the next item. Return the item of the tile.
inline const AttentionItem* following_tile(const Attention& call, const AttentionItem& item, int key,
                                           const AttentionItem* next, Tile& tile) {
    const int after = key + TILE_KEYS;
    const bool more = after < end_of(call, item) && after < item.split_end * SPLIT_KEYS;
    const AttentionItem* owner = more ? &item : next;
    if (owner == nullptr) return nullptr;
    tile.find(call, call.slices[owner->slice], more ? after : first_tile(call, *owner, owner->split),
              end_of(call, *owner));
    return owner;
}

// Compute the sums of one split for all heads of the item, into work.maximum, total and out.
template <class In>
inline void attend_split(const Attention& call, const AttentionItem& item, int split, const AttentionItem* next,
                         Work& work) {
    const int rows = item.count * call.sizes->group(), heads = item.head_end - item.head;
    const int end = end_of(call, item), first = first_tile(call, item, split);
    const int split_end = (split + 1) * SPLIT_KEYS < end ? (split + 1) * SPLIT_KEYS : end;
    const int64_t head_bytes = call.arena->token_bytes / call.sizes->kv_heads;
    Tile tiles[2];
    int current = 0;
    tiles[current].find(call, call.slices[item.slice], first, end);
    forget(work.maximum, work.total, work.out, rows * heads, call.sizes->value_pad());
    for (int key = first; key < split_end; key += TILE_KEYS, current = 1 - current) {
        Tile& following = tiles[1 - current];
        const AttentionItem* owner = following_tile(call, item, key, next, following);
        Prefetch prefetch = owner == nullptr ? Prefetch(nullptr, 0, 0, heads)
                                             : Prefetch(&following, owner->head * head_bytes,
                                                        owner->head_end * head_bytes, heads);
        for (int head = item.head; head < item.head_end; head++)
            attend_tile<In>(call, item, head, tiles[current], (head - item.head) * rows, work, prefetch);
    }
}

inline void put_head(const Attention& call, int token, int head, const float* out, float total) {
    const int dim = call.sizes->value_dim();
    float row[HEAD_DIM_MAX];
    const float factor = 1.0f / total;
    for (int i = 0; i < dim; i++) row[i] = out[i] * factor;
    store_row(call.out_number, call.out.data, token * call.out.stride + int64_t{head} * call.out_dim, row, dim);
}

// Write the finished sums of one head's rows: to the output, or as a part for merge_parts().
inline void put_rows(const Attention& call, const AttentionItem& item, int head, int state, const Work& work) {
    const int group = call.sizes->group(), pad = call.sizes->value_pad(), rows = item.count * group;
    for (int row = 0; row < rows; row++) {
        const float* out = work.all_out + int64_t{state + row} * pad;
        if (item.part == WHOLE) {
            const int token = call.slices[item.slice].first + item.query + row / group;
            put_head(call, token, head * group + row % group, out, work.all_total[state + row]);
        } else {
            float* part = call.parts + (int64_t{item.part} + head * rows + row) * (2 + pad);
            part[0] = work.all_maximum[state + row], part[1] = work.all_total[state + row];
            std::memcpy(part + 2, out, size_t(pad) * 4);
        }
    }
}

template <class In>
inline void attend_item(const Attention& call, const AttentionItem& item, const AttentionItem* next, Work& work) {
    const int pad = call.sizes->value_pad(), rows = item.count * call.sizes->group();
    const int states = rows * (item.head_end - item.head);
    forget(work.all_maximum, work.all_total, work.all_out, states, pad);
    for (int split = item.split; split < item.split_end; split++) {
        attend_split<In>(call, item, split, next, work);
        for (int state = 0; state < states; state++)
            merge(work.all_maximum + state, work.all_total + state, work.all_out + int64_t{state} * pad,
                  work.maximum[state], work.total[state], work.out + int64_t{state} * pad, pad);
    }
    for (int head = item.head; head < item.head_end; head++)
        put_rows(call, item, head, (head - item.head) * rows, work);
}

void attend(const Attention& call, const AttentionItem& item, const AttentionItem* next, float* memory) {
    const int rows = item.count * call.sizes->group();
    Work work(memory, *call.sizes, rows, rows * (item.head_end - item.head));
    if (call.queries.number == Number::BF16) attend_item<InBF16>(call, item, next, work);
    else attend_item<InF32>(call, item, next, work);
}

// Merge the parts of queries whose splits are separate items: parts [split][kv_head][row], from item.part.
void merge_parts(const Attention& call, const AttentionItem& item, float* memory) {
    const int group = call.sizes->group(), pad = call.sizes->value_pad(), rows = item.count * group;
    const int64_t record = 2 + pad;
    for (int head = item.head; head < item.head_end; head++)
        for (int row = 0; row < rows; row++) {
            float maximum, total;
            forget(&maximum, &total, memory, 1, pad);
            for (int split = item.split; split < item.split_end; split++) {
                const int64_t at = item.part + (int64_t{split - item.split} * call.sizes->kv_heads + head) * rows + row;
                const float* part = call.parts + at * record;
                merge(&maximum, &total, memory, part[0], part[1], part + 2, pad);
            }
            const int token = call.slices[item.slice].first + item.query + row / group;
            put_head(call, token, head * group + row % group, memory, total);
        }
}

}  // namespace
}  // namespace baton
