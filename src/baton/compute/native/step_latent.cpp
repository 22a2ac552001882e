// The part of a step for latent attention, always in the absorbed form: queries are projected into the latent space,
// and the attention output is projected back. Expanding keys and values would take fewer operations for a long chunk,
// but gives other bits: a token's bits would depend on its chunk.
#include "cut.h"
#include "step.h"

namespace baton {

void Stepper::reserve_latent(int rows) {
    const Sizes& s = model_.sizes;
    const LatentSizes& l = s.latent;
    const int64_t n = padded(rows, 16), cell = model_.cell_bytes(), narrow = padded(l.q_rank, INPUTS_ALIGN);
    const int64_t nope = int64_t{s.heads} * l.nope_pad(), read = int64_t{s.heads} * s.value_pad();
    narrow_rows_ = {narrow_.reserve(size_t(n * narrow * cell)), narrow};
    wide_rows_ = wide_.reserve_of<float>(n * s.heads * l.query_dim());
    nope_rows_ = {nope_.reserve(size_t(n * nope * cell)), nope};
    read_rows_ = {read_.reserve(size_t(n * read * cell)), read};
}

// Write all rows' queries and latents to their places, from the output of the layer's qkv.
void Stepper::place_latents(const Batch& batch, int index, int& phase) {
    Model& m = model_;
    const Sizes& s = m.sizes;
    const Layer& layer = m.layers[size_t(index)];
    const int64_t width = layer.qkv.outputs;
    float* queries = qkv_rows_;
    int64_t query_stride = width;
    if (s.latent.q_rank > 0) {
        m.team.phase(phase++, norm_items(batch.rows), [&](int item) {
            const int first = item * NORM_ROWS, count = std::min(NORM_ROWS, batch.rows - first);
            m.kernels.normalize_rows(qkv_rows_, width, s.latent.q_rank, layer.latent.q_norm, LATENT_NORM_EPS, first,
                                     count, m.number, narrow_rows_);
        });
        queries = wide_rows_, query_stride = layer.latent.queries.outputs;
        multiply(layer.latent.queries, narrow_rows_, batch.rows, queries, phase);
    }
    m.team.phase(phase++, batch.rows, [&](int row) {
        const LatentToken token{queries + row * query_stride, qkv_rows_ + (row + 1) * width - s.head_dim,
                                batch.angles + int64_t{batch.positions[size_t(row)]} * s.rotary_dim(), row};
        m.kernels.place_latent(s, layer.latent.kv_norm, token, query_rows_, nope_rows_, m.number, m.arena.number,
                               slot(batch, index, 0, row));
    });
    const Rows absorbed{query_rows_.data, int64_t{s.heads} * s.head_pad()};
    project_heads(layer.latent.keys, nope_rows_, batch.rows, absorbed, s.head_pad(), query_rows_.number, phase);
}

// Project the attention output back from the latent space, into rows of the output projection.
void Stepper::read_values(const Layer& layer, int rows, int& phase) {
    const Sizes& s = model_.sizes;
    project_heads(layer.latent.values, read_rows_, rows, attended_rows_, s.latent.value_dim, model_.number, phase);
}

// Multiply every head's part of the rows with the head's own matrix. `out`: [rows][heads][width] in `number`.
void Stepper::project_heads(const std::vector<Linear>& heads, Rows in, int rows, Rows out, int width, Number number,
                            int& phase) {
    const int64_t in_cell = model_.cell_bytes(), out_cell = number == Number::BF16 ? 2 : 4;
    const Cut cut(rows, heads[0], in_cell);
    model_.team.phase(phase++, int(heads.size()) * cut.items(), [&](int at) {
        const int head = at / cut.items(), item = at % cut.items();
        const Linear& w = heads[size_t(head)];
        const Rows from{static_cast<uint8_t*>(in.data) + head * w.inputs * in_cell, in.stride};
        const Rows to{static_cast<uint8_t*>(out.data) + int64_t{head} * width * out_cell, out.stride};
        model_.kernels.linear_rounded(w, from, cut.first(item), cut.count(item), cut.panel(item), to, number);
    });
}

}  // namespace baton
