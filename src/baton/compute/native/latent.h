// Kernels of multi-head latent attention (MLA): RoPE and the KV write, and a GEMM whose results are rounded to the type
// of the next GEMM.
#pragma once
#include "gemm.h"
#include "rows.h"

namespace baton {
namespace {

// Apply RoPE to one token's queries and latent. The rotary part of a query is written behind its kv_rank numbers, the
// rest to `nope` [token][head][nope_pad], which is projected later. The latent is written to its slot in the KV block.
void rope_and_write_latent(const Sizes& sizes, const float* kv_norm, const LatentToken& from, Queries queries,
                           Rows nope, DType dtype, DType kv_dtype, uint8_t* slot) {
    const LatentSizes& l = sizes.latent;
    for (int head = 0; head < sizes.heads; head++) {
        float *nope_part = from.queries + int64_t{head} * l.query_dim(), *rope_part = nope_part + l.nope_dim;
        store_row(dtype, nope.data, from.token * nope.stride + int64_t{head} * l.nope_pad(), nope_part, l.nope_dim);
        apply_rope(rope_part, from.angles, l.rope_dim);
        const int64_t at = queries.at(sizes, 0, from.token) + int64_t{head} * sizes.head_pad() + l.kv_rank;
        store_row(queries.dtype, queries.data, at, rope_part, l.rope_dim);
    }
    rms_norm(from.latent, kv_norm, from.latent, l.kv_rank, LATENT_NORM_EPS);
    apply_rope(from.latent + l.kv_rank, from.angles, l.rope_dim);
    write_kv_head(kv_dtype, slot, from.latent, sizes.head_dim);
}

// out[row][output] = a x w, rounded to `dtype`
void linear_to_dtype(const Linear& w, Rows a, const PanelItem& item, Rows out, DType dtype) {
    const OutputRows written(out, dtype == DType::BF16 ? 2 : 4, item.panel * PANEL, PANEL);
    multiply_panel(w, a, item, written, [&](const float* c, int row, int rows) {
        for (int r = 0; r < rows; r++)
            store_row(dtype, out.data, (row + r) * out.stride + item.panel * PANEL, c + r * PANEL,
                      panel_columns(w, item.panel));
    });
}

}  // namespace
}  // namespace baton
