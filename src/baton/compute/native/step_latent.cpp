// Multi-head latent attention (MLA), always in the absorbed form: queries are projected into the latent space,
// and the attention output is projected back. Expanding keys and values would take fewer operations for a long chunk,
// but gives other bits: a token's bits would depend on its chunk.
#include "step.h"

namespace baton {

void Stepper::reserve_latent(int rows) {
    const Sizes& s = model_.sizes;
    const LatentSizes& l = s.latent;
    const int64_t n = padded(rows, 16), element_bytes = model_.element_bytes(), narrow = padded(l.q_rank, INPUTS_ALIGN);
    const int64_t nope = int64_t{s.heads} * l.nope_pad(), read = int64_t{s.heads} * s.value_pad();
    query_latent_rows_ = {query_latents_.reserve(size_t(n * narrow * element_bytes)), narrow};
    latent_query_rows_ = latent_queries_.reserve_of<float>(n * s.heads * l.query_dim());
    nope_rows_ = {nope_.reserve(size_t(n * nope * element_bytes)), nope};
    latent_out_rows_ = {latent_out_.reserve(size_t(n * read * element_bytes)), read};
}

// Compute all rows' queries and latents from the output of the layer's qkv, and write latents to their KV blocks.
void Stepper::rope_and_write_latents(const Batch& batch, int index, int& phase) {
    Model& m = model_;
    const Sizes& s = m.sizes;
    const Layer& layer = m.layers[size_t(index)];
    const int64_t width = layer.qkv.outputs;
    float* queries = qkv_rows_;
    int64_t query_stride = width;
    if (s.latent.q_rank > 0) {
        m.thread_pool.phase(phase++, row_items(batch.rows), [&](int item) {
            const int first = item * ROWS_PER_ITEM, count = std::min(ROWS_PER_ITEM, batch.rows - first);
            m.kernels.rms_norm_rows(qkv_rows_, width, s.latent.q_rank, layer.latent.q_norm, LATENT_NORM_EPS, first,
                                    count, m.dtype, query_latent_rows_);
        });
        queries = latent_query_rows_, query_stride = layer.latent.queries.outputs;
        const Rows in = quantized_rows(layer.latent.queries, query_latent_rows_, batch.rows, phase);
        multiply(layer.latent.queries, in, batch.rows, queries, phase);
    }
    m.thread_pool.phase(phase++, batch.rows, [&](int row) {
        const LatentToken token{queries + row * query_stride, qkv_rows_ + (row + 1) * width - s.head_dim,
                                batch.angles + int64_t{batch.positions[size_t(row)]} * s.rotary_dim(), row};
        m.kernels.rope_and_write_latent(s, layer.latent.kv_norm, token, query_rows_, nope_rows_, m.dtype, m.arena.dtype,
                                        slot(batch, index, 0, row));
    });
    const Rows absorbed{query_rows_.data, int64_t{s.heads} * s.head_pad()};
    project_heads(layer.latent.keys, nope_rows_, batch.rows, absorbed, s.head_pad(), query_rows_.dtype, phase);
}

// Project the attention output back from the latent space, into rows of the output projection.
void Stepper::project_values(const Layer& layer, int rows, int& phase) {
    const Sizes& s = model_.sizes;
    project_heads(layer.latent.values, latent_out_rows_, rows, attention_out_rows_, s.latent.value_dim, model_.dtype,
                  phase);
}

// Multiply every head's part of the rows with the head's own matrix. `out`: [rows][heads][width] in `dtype`.
void Stepper::project_heads(const std::vector<Linear>& heads, Rows in, int rows, Rows out, int width, DType dtype,
                            int& phase) {
    const int64_t in_element_bytes = model_.element_bytes(), out_element_bytes = dtype == DType::BF16 ? 2 : 4;
    const GemmTiling tiling = tile(heads[0], rows);
    model_.thread_pool.phase(phase++, int(heads.size()) * tiling.items(), [&](int at) {
        const int head = at / tiling.items(), item = at % tiling.items();
        const Linear& w = heads[size_t(head)];
        const Rows from{static_cast<uint8_t*>(in.data) + head * w.inputs * in_element_bytes, in.stride};
        const Rows to{static_cast<uint8_t*>(out.data) + int64_t{head} * width * out_element_bytes, out.stride};
        model_.kernels.linear_to_dtype(w, from, tiling.at(item), to, dtype);
    });
}

}  // namespace baton
