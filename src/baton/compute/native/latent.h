// The rows of latent attention: queries split into their two parts, latents written, and products with results rounded
// to the type of the next product.
#pragma once
#include "gemm.h"
#include "rows.h"

namespace baton {
namespace {

// Rotate one token's queries and its latent. The rotated part of queries is written behind kv_rank, the rest to `nope`
// [token][head][nope_pad], which is projected later. The latent is written to its slot in the KV block.
void place_latent(const Sizes& sizes, const float* kv_norm, const LatentToken& from, Queries queries, Rows nope,
                  Number number, Number kv_number, uint8_t* slot) {
    const LatentSizes& l = sizes.latent;
    for (int head = 0; head < sizes.heads; head++) {
        float *plain = from.queries + int64_t{head} * l.query_dim(), *turned = plain + l.nope_dim;
        store_row(number, nope.data, from.token * nope.stride + int64_t{head} * l.nope_pad(), plain, l.nope_dim);
        rotate(turned, from.angles, l.rope_dim);
        const int64_t at = queries.at(sizes, 0, from.token) + int64_t{head} * sizes.head_pad() + l.kv_rank;
        store_row(queries.number, queries.data, at, turned, l.rope_dim);
    }
    normalize(from.latent, kv_norm, from.latent, l.kv_rank, LATENT_NORM_EPS);
    rotate(from.latent + l.kv_rank, from.angles, l.rope_dim);
    put_kv_head(kv_number, slot, from.latent, sizes.head_dim);
}

// out[row][output] = a x w, as `number`
void linear_rounded(const Linear& w, Rows a, int first, int count, int panel, Rows out, Number number) {
    any_panel_tiles(w, a, first, count, panel, [&](const float* c, int row, int rows) {
        for (int r = 0; r < rows; r++)
            store_row(number, out.data, (row + r) * out.stride + panel * PANEL, c + r * PANEL, columns_of(w, panel));
    });
}

}  // namespace
}  // namespace baton
