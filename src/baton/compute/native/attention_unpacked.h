// Attention of few query rows (a decode step). Packing a tile of keys and values would take longer than its products,
// so these kernels read the KV rows in place: they transpose keys and pair values in registers. They add in the same
// order as multiply() of gemm.h, so that both paths give the same bits.
#pragma once
#include "kv_tile.h"
#include "transpose.h"

namespace baton {
namespace {

#if defined(__AVX512F__) || defined(__AVX2__) || defined(BATON_NEON)

#if defined(__AVX512F__)
constexpr int UNPACKED_ROWS_MAX = 8;
constexpr int UNPACKED_SUMS_MAX = 16;  // registers of sums over values
#else
constexpr int UNPACKED_ROWS_MAX = 6;
constexpr int UNPACKED_SUMS_MAX = 12;
#endif

// Return whether this many query rows use the kernels below. AMX adds pairs in another order than vector
// instructions, so either all products use AMX or none.
template <class In>
inline bool is_unpacked(int rows) {
#if defined(BATON_AMX)
    return In::K_STEP == 1 && rows <= UNPACKED_ROWS_MAX;
#else
    return rows <= UNPACKED_ROWS_MAX;
#endif
}

// sum += a[0] * b, or a[0] * (first numbers of b's pairs) + a[1] * (second ones).
inline Vec add_product(const float* a, Words b, Vec sum) { return fma(broadcast(*a), as_floats(b), sum); }
inline Vec add_product(const bf16* a, Words b, Vec sum) { return add_pair_products(a, b, sum); }

// scores[ROWS][keys] = q[ROWS][words] x the keys' rows. `words`: 4-byte units of a padded row.
template <class In, int ROWS>
inline void score_unpacked(const typename In::Element* q, int words, const void* const* rows, int keys, float* scores,
                           TilePrefetcher& prefetcher) {
    for (int key = 0; key < keys; key += LANES) {
        Vec sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = zero();
        for (int at = 0; at < words; at += LANES) {
            Words columns[LANES];
            prefetcher.prefetch_portion(2 * (keys / LANES) * (words / LANES));
            transpose(rows + key, at, columns);
            for (int i = 0; i < LANES; i++)
                for (int r = 0; r < ROWS; r++)
                    sums[r] = add_product(q + int64_t{r * words + at + i} * In::K_STEP, columns[i], sums[r]);
        }
        for (int r = 0; r < ROWS; r++) store(scores + r * TILE_KEYS + key, sums[r]);
    }
}

// 2 * LANES dimensions of one key's values; or of two keys', side by side.
inline void load_values(const void* const* rows, int dim, Words* out, const float*) {
    const float* row = static_cast<const float*>(rows[0]) + dim;
    out[0] = load_words(row), out[1] = load_words(row + LANES);
}

inline void load_values(const void* const* rows, int dim, Words* out, const bf16*) {
    interleave(static_cast<const bf16*>(rows[0]) + dim, static_cast<const bf16*>(rows[1]) + dim, out[0], out[1]);
}

// out[ROWS][dim .. dim + LANES * VECS) += weights[ROWS][keys] x the values' rows.
template <class In, int ROWS, int VECS>
inline void accumulate_unpacked(const typename In::Element* weights, const void* const* rows, int keys, int dim,
                                float* out, int head_pad, TilePrefetcher& prefetcher) {
    Vec sums[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) sums[r][v] = load(out + r * head_pad + dim + v * LANES);
    for (int key = 0; key < keys; key += In::K_STEP) {
        Words values[VECS];
        if (key % 8 == 0) prefetcher.prefetch_portion(keys / 4 * head_pad / (VECS * LANES));
        for (int v = 0; v < VECS; v += 2) load_values(rows + key, dim + v * LANES, values + v, weights);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++)
                sums[r][v] = add_product(weights + r * TILE_KEYS + key, values[v], sums[r][v]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(out + r * head_pad + dim + v * LANES, sums[r][v]);
}

template <class In, int ROWS = UNPACKED_ROWS_MAX>
inline void score_unpacked(int count, const typename In::Element* q, int words, const void* const* rows, int keys,
                           float* scores, TilePrefetcher& prefetcher) {
    if constexpr (ROWS > 1)
        if (count < ROWS) return score_unpacked<In, ROWS - 1>(count, q, words, rows, keys, scores, prefetcher);
    score_unpacked<In, ROWS>(q, words, rows, keys, scores, prefetcher);
}

template <class In, int ROWS = UNPACKED_ROWS_MAX>
inline void accumulate_unpacked(int count, const typename In::Element* weights, const void* const* rows, int keys,
                                float* out, int head_pad, TilePrefetcher& prefetcher) {
    if constexpr (ROWS > 1)
        if (count < ROWS)
            return accumulate_unpacked<In, ROWS - 1>(count, weights, rows, keys, out, head_pad, prefetcher);
    constexpr int VECS = ROWS * 4 > UNPACKED_SUMS_MAX ? 2 : 4;
    int dim = 0;
    for (; dim + VECS * LANES <= head_pad; dim += VECS * LANES)
        accumulate_unpacked<In, ROWS, VECS>(weights, rows, keys, dim, out, head_pad, prefetcher);
    for (; dim < head_pad; dim += 2 * LANES)
        accumulate_unpacked<In, ROWS, 2>(weights, rows, keys, dim, out, head_pad, prefetcher);
}

#endif

}  // namespace
}  // namespace baton
