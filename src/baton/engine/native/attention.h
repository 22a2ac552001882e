// Attention of a few queries over the KV blocks of one request.
// Keys come in tiles of 64, tiles in splits of 256, both at fixed absolute positions. A split has its own running maximum,
// sum and output; splits are merged in order. A key that a query does not see weighs exactly 0 and changes no bit.
// Source: online softmax, arXiv 1805.02867; tiles and the merge by log-sum-exp, arXiv 2205.14135, section 3.
#pragma once
#include "gemm.h"
#include "rows.h"

namespace baton {
namespace {

// One thread's memory for an item, cut from one buffer. rows: queries x grouped heads; states: rows x KV heads.
struct Work {
    float *scores, *weights, *maximum, *total, *out, *all_maximum, *all_total, *all_out, *keys, *values, *tile;

    static int64_t floats(const Sizes& s, int rows, int states) {
        const int64_t pad = s.head_pad();
        return rows * 2 * TILE_KEYS + states * (4 + 2 * pad) + 3 * TILE_KEYS * pad + 16 * PIECES;
    }
    Work(float* memory, const Sizes& s, int rows, int states) : end(memory) {
        const int64_t pad = s.head_pad();
        scores = take(rows * TILE_KEYS), weights = take(rows * TILE_KEYS);
        maximum = take(states), total = take(states), out = take(states * pad);
        all_maximum = take(states), all_total = take(states), all_out = take(states * pad);
        keys = take(TILE_KEYS * pad), values = take(TILE_KEYS * pad), tile = take(TILE_KEYS * pad);
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

// ---- packing a tile of keys or values into panels ----------------------------------------------------------------

#if defined(__AVX512F__)
// out[i][0..15] = rows[0..15][i] for 16 numbers of 4 bytes.
inline void transpose16(const void* const* rows, int64_t at, uint32_t* out, int64_t stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(static_cast<const uint32_t*>(rows[i]) + at);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#else
inline void transpose16(const void* const* rows, int64_t at, uint32_t* out, int64_t stride) {
    for (int r = 0; r < 16; r++)
        for (int i = 0; i < 16; i++)
            std::memcpy(out + i * stride + r, static_cast<const uint32_t*>(rows[r]) + at + i, 4);
}
#endif

// Keys of TILE_KEYS rows as panels of 32 keys. `words`: 4-byte units of a padded row (one float32, two bfloat16).
inline void pack_keys(const void* const* rows, int words, int keys, uint32_t* out) {
    for (int key = 0; key < keys; key += 16) {
        uint32_t* panel = out + int64_t{key / PANEL} * PANEL * words + key % PANEL;
        for (int at = 0; at < words; at += 16) transpose16(rows + key, at, panel + int64_t{at} * PANEL, PANEL);
    }
}

// Values of TILE_KEYS rows as panels of 32 dimensions: [dim / 32][key][32], or [dim / 32][key / 2][32][2].
inline void pack_values(const void* const* rows, int head_pad, int keys, float* out) {
    for (int dim = 0; dim < head_pad; dim += PANEL)
        for (int key = 0; key < keys; key++)
            std::memcpy(out + (int64_t{dim} * TILE_KEYS + key * PANEL), static_cast<const float*>(rows[key]) + dim,
                        PANEL * 4);
}

inline void interleave(const bf16* a, const bf16* b, bf16* out) {  // 32 of each
#if defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(x, high, y));
#else
    for (int i = 0; i < PANEL; i++) out[2 * i] = a[i], out[2 * i + 1] = b[i];
#endif
}

inline void pack_values(const void* const* rows, int head_pad, int keys, bf16* out) {
    for (int dim = 0; dim < head_pad; dim += PANEL)
        for (int key = 0; key < keys; key += 2)
            interleave(static_cast<const bf16*>(rows[key]) + dim, static_cast<const bf16*>(rows[key + 1]) + dim,
                       out + (int64_t{dim} * TILE_KEYS + key * PANEL));
}

// Where the keys of a tile lie: all KV heads of a token stand side by side, and its values one plane further.
struct Tile {
    int first_key, valid;  // keys from `valid` on are not there, or not yet
    const uint8_t* keys[TILE_KEYS];
    int64_t plane_bytes;

    Tile(const Attention& call, const Slice& slice, int first_key, int end) : first_key(first_key) {
        const Arena& arena = *call.arena;
        valid = end - first_key < TILE_KEYS ? end - first_key : TILE_KEYS;
        plane_bytes = arena.block_tokens * arena.token_bytes;
        int block = first_key / arena.block_tokens, slot = first_key % arena.block_tokens;
        for (int key = 0; key < valid; key++) {
            keys[key] = slot == 0 || key == 0 ? arena.row(slice.blocks[block], call.layer, 0, slot)
                                              : keys[key - 1] + arena.token_bytes;
            if (++slot == arena.block_tokens) slot = 0, block++;
        }
    }
};

// Brings the next tile into the cache in small portions, while the current one is computed.
class Prefetch {
public:
    // The bytes [from, to) of each of the tile's keys and values; null: nothing follows.
    Prefetch(const Tile* tile, int64_t from, int64_t to) : tile_(tile), from_(from), to_(to) {}

    void some(int tokens) {
        if (tile_ == nullptr) return;
        for (; tokens > 0 && next_ < 2 * tile_->valid; next_++, tokens--) {
            const uint8_t* row = tile_->keys[next_ / 2] + (next_ % 2) * tile_->plane_bytes;
            for (int64_t at = from_; at < to_; at += 64) __builtin_prefetch(row + at, 0, 2);  // second level: a tile is larger than the first
        }
    }

private:
    const Tile* tile_;
    int64_t from_, to_;
    int next_ = 0;
};

// The rows of a tile's keys (plane 0) or values (1) for one head, in the number of products; missing ones are zeros.
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
    for (int key = 0; key < tile.valid; key++) {
        float row[HEAD_DIM_MAX] = {};
        load_kv_head(kv_number, rows[key], row, sizes.head_dim);
        Cell* copy = copies + int64_t{key} * sizes.head_pad();
        store_row(copy, row, sizes.head_pad());
        rows[key] = copy;
    }
}

// ---- one tile ----------------------------------------------------------------------------------------------------

// Turn a row of scores into weights; keys outside [from, to) get none. Returns by how much earlier sums shrink.
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

// Fold a tile into the sums of one head, which begin at `state`.
template <class In>
inline void attend_tile(const Attention& call, const AttentionItem& item, int head, const Tile& tile, int state,
                        Work& work, Prefetch& next) {
    using Cell = typename In::Cell;
    const Sizes& sizes = *call.sizes;
    const Slice& slice = call.slices[item.slice];
    const int pad = sizes.head_pad(), group = sizes.group(), rows = item.count * group;
    const int keys = padded(tile.valid, PANEL), portion = TILE_KEYS * 2 / 4 / (item.head_end - item.head) + 1;
    const void* found[TILE_KEYS];
    Cell *key_panels = reinterpret_cast<Cell*>(work.keys), *value_panels = reinterpret_cast<Cell*>(work.values);
    Cell *copies = reinterpret_cast<Cell*>(work.tile), *weights = reinterpret_cast<Cell*>(work.weights);
    float* out = work.out + int64_t{state} * pad;
    tile_rows(call, tile, 0, head, copies, found);
    pack_keys(found, pad / In::STEP, keys, reinterpret_cast<uint32_t*>(key_panels));
    next.some(portion);

    const Cell* q = static_cast<const Cell*>(call.queries.data) + call.queries.at(sizes, head, slice.first + item.query);
    for (int key = 0; key < keys; key += PANEL)
        for_row_tiles<In>(rows, [&](int row, int count) {
            multiply<In, false>(count, q + int64_t{row} * pad, pad, key_panels + int64_t{key} * pad, pad,
                                work.scores + row * TILE_KEYS + key, TILE_KEYS);
        });
    next.some(portion);
    for (int row = 0; row < rows; row++) {
        const int position = slice.start + item.query + row / group - tile.first_key;
        const int from = call.window == 0 ? 0 : position - call.window + 1;
        const float shrink = soften(work.scores + row * TILE_KEYS, weights + row * TILE_KEYS, keys, from, position + 1,
                                    call.scale, work.maximum + state + row, work.total + state + row);
        scale_row(out + int64_t{row} * pad, pad, shrink);
    }
    next.some(portion);
    tile_rows(call, tile, 1, head, copies, found);
    pack_values(found, pad, keys, value_panels);
    next.some(portion);
    for (int dim = 0; dim < pad; dim += PANEL)
        for_row_tiles<In>(rows, [&](int row, int count) {
            multiply<In, true>(count, weights + row * TILE_KEYS, TILE_KEYS, value_panels + int64_t{dim} * TILE_KEYS,
                               keys, out + int64_t{row} * pad + dim, pad);
        });
}

// ---- splits and their merge --------------------------------------------------------------------------------------

// Fold a split's (maximum, total, out) into what earlier splits gave. Nothing plus a part is exactly the part.
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

// The first key of a split that any query of the item sees, cut down to its tile.
inline int first_tile(const Attention& call, const AttentionItem& item, int split) {
    const int query = call.slices[item.slice].start + item.query, key = split * SPLIT_KEYS;
    const int seen_from = call.window == 0 || query < call.window ? 0 : query - call.window + 1;
    return key >= seen_from ? key : seen_from / TILE_KEYS * TILE_KEYS;
}

// Compute the sums of one split for all heads of the item, into work.maximum, total and out.
template <class In>
inline void attend_split(const Attention& call, const AttentionItem& item, int split, Work& work) {
    const Slice& slice = call.slices[item.slice];
    const int rows = item.count * call.sizes->group(), heads = item.head_end - item.head;
    const int end = slice.start + item.query + item.count;  // one past the last key that any query here sees
    const int split_end = (split + 1) * SPLIT_KEYS < end ? (split + 1) * SPLIT_KEYS : end;
    const int64_t head_bytes = call.arena->token_bytes / call.sizes->kv_heads;
    forget(work.maximum, work.total, work.out, rows * heads, call.sizes->head_pad());
    for (int key = first_tile(call, item, split); key < split_end; key += TILE_KEYS) {
        const Tile tile(call, slice, key, end);
        const bool more = key + TILE_KEYS < end;
        const Tile following(call, slice, more ? key + TILE_KEYS : key, end);
        Prefetch next(more ? &following : nullptr, item.head * head_bytes, item.head_end * head_bytes);
        for (int head = item.head; head < item.head_end; head++)
            attend_tile<In>(call, item, head, tile, (head - item.head) * rows, work, next);
    }
}

inline void put_head(const Attention& call, int token, int head, const float* out, float total) {
    const int dim = call.sizes->head_dim;
    float row[HEAD_DIM_MAX];
    const float factor = 1.0f / total;
    for (int i = 0; i < dim; i++) row[i] = out[i] * factor;
    store_row(call.out_number, call.out.data, token * call.out.stride + int64_t{head} * dim, row, dim);
}

// Hand on the finished sums of one head's rows: to the output, or as a part that merge_parts() will fetch.
inline void put_rows(const Attention& call, const AttentionItem& item, int head, int state, const Work& work) {
    const int group = call.sizes->group(), pad = call.sizes->head_pad(), rows = item.count * group;
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
inline void attend_item(const Attention& call, const AttentionItem& item, Work& work) {
    const int pad = call.sizes->head_pad(), rows = item.count * call.sizes->group();
    const int states = rows * (item.head_end - item.head);
    forget(work.all_maximum, work.all_total, work.all_out, states, pad);
    for (int split = item.split; split < item.split_end; split++) {
        attend_split<In>(call, item, split, work);
        for (int state = 0; state < states; state++)
            merge(work.all_maximum + state, work.all_total + state, work.all_out + int64_t{state} * pad,
                  work.maximum[state], work.total[state], work.out + int64_t{state} * pad, pad);
    }
    for (int head = item.head; head < item.head_end; head++)
        put_rows(call, item, head, (head - item.head) * rows, work);
}

void attend(const Attention& call, const AttentionItem& item, float* memory) {
    const int rows = item.count * call.sizes->group();
    Work work(memory, *call.sizes, rows, rows * (item.head_end - item.head));
    if (call.queries.number == Number::BF16) attend_item<InBF16>(call, item, work);
    else attend_item<InF32>(call, item, work);
}

// Merge the parts of queries whose splits were shared out: parts [split][kv_head][row], from item.part.
void merge_parts(const Attention& call, const AttentionItem& item, float* memory) {
    const int group = call.sizes->group(), pad = call.sizes->head_pad(), rows = item.count * group;
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
