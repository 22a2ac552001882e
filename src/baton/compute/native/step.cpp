#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cut.h"

namespace baton {
namespace {

constexpr int DENSE_PHASES = 13, EXPERTS_PHASES = 22, LATENT_PHASES = 5;  // of a layer; latent attention adds its own

}  // namespace

void Stepper::reserve(int rows) {
    const Sizes& s = model_.sizes;
    const Layer& layer = model_.layers[0];  // attention has the same sizes in all layers
    const int64_t cell = model_.cell_bytes(), hidden = padded(s.hidden, INPUTS_ALIGN), heads = layer.o.inputs;
    const int64_t narrow = padded(s.latent.q_rank, INPUTS_ALIGN);
    int gated = 0;
    for (const Mlps& mlps : model_.mlps)
        gated = std::max({gated, mlps.all.front().down.inputs, mlps.all.back().down.inputs});
    const int64_t n = padded(rows, 16);  // an AMX tile reads 16 rows
    const int64_t dealt = padded(reserve_experts(rows), 16);
    x_ = hidden_.reserve_of<float>(n * s.hidden);
    qkv_rows_ = qkv_.reserve_of<float>(n * layer.qkv.outputs);
    in_ = {inputs_.reserve(size_t(n * hidden * cell)), hidden};
    attended_rows_ = {attended_.reserve(size_t(n * heads * cell)), heads};
    const int64_t widest = std::max({hidden, heads, narrow, int64_t{gated}});
    rounded_.reserve(size_t(dealt * model_.kernels.quant_row_bytes(int(widest))));
    gated_rows_ = {gated_.reserve(size_t(dealt * gated * cell)), gated};
    const Number number = model_.number == Number::BF16 && model_.arena.number != Number::F32 ? Number::BF16
                                                                                                : Number::F32;
    const int64_t query_bytes = int64_t{s.heads} * s.head_pad() * (number == Number::BF16 ? 2 : 4);
    query_rows_ = {queries_.reserve(size_t((n + 16) * query_bytes)), number, rows};
    if (s.is_latent()) reserve_latent(rows);
}

// Return rows as a product takes them: rounded to 8 bits for quantized weights.
Rows Stepper::rounded(const Linear& w, Rows in, int rows, int& phase) {
    if (!is_quantized(w.number)) return in;
    void* out = rounded_.reserve_of<uint8_t>(0);
    model_.team.phase(phase++, norm_items(rows), [&](int item) {
        const int first = item * NORM_ROWS, count = std::min(NORM_ROWS, rows - first);
        model_.kernels.quantize_rows(in, w.rows_number, w.inputs, first, count, out);
    });
    return {out, 0};
}

// out [rows][outputs] = in x w
void Stepper::multiply(const Linear& w, Rows in, int rows, float* out, int& phase) {
    const Cut cut(rows, w, model_.cell_bytes());
    const Rows taken = rounded(w, in, rows, phase);
    model_.team.phase(phase++, cut.items(), [&](int item) {
        model_.kernels.linear(w, taken, cut.first(item), cut.count(item), cut.panel(item), out, w.outputs);
    });
}

// Normalize rows of the residual stream.
void Stepper::normalize(const float* weight, int rows, Number number, Rows out, int& phase) {
    const Sizes& s = model_.sizes;
    model_.team.phase(phase++, norm_items(rows), [&](int item) {
        const int first = item * NORM_ROWS, count = std::min(NORM_ROWS, rows - first);
        model_.kernels.normalize_rows(x_, s.hidden, s.hidden, weight, s.rms_eps, first, count, number, out);
    });
}

void Stepper::plan(const Batch& batch) {
    plans_.clear();
    slice_of_row_.resize(size_t(batch.rows));
    for (size_t slice = 0; slice < batch.slices.size(); slice++)
        for (int i = 0; i < batch.slices[slice].count; i++)
            slice_of_row_[size_t(batch.slices[slice].first + i)] = int32_t(slice);
    int64_t parts = 0;
    int rows = 1, states = 1;
    for (const Layer& layer : model_.layers) {
        if (plans_.count(layer.window) != 0) continue;
        const AttentionPlan& plan = plans_[layer.window] =
            plan_attention(model_.sizes, batch.slices, layer.window, model_.team.threads());
        parts = std::max(parts, plan.parts);
        rows = std::max(rows, plan.rows_max);
        states = std::max(states, plan.states_max);
    }
    parts_.reserve_of<float>(parts * (2 + model_.sizes.value_pad()));
    work_floats_ = padded(int(model_.kernels.attention_floats(model_.sizes, rows, states)), 16);
    work_.reserve_of<float>(work_floats_ * model_.team.threads());
}

void Stepper::forward(const Batch& batch) {
    rows_ = 0;
    reserve(batch.rows);
    plan(batch);
    Model& m = model_;
    float* work = work_.reserve_of<float>(0);
    int phases = 1;
    for (const Mlps& mlps : m.mlps) phases += mlps.routed() ? EXPERTS_PHASES : DENSE_PHASES;
    if (m.sizes.is_latent()) phases += m.sizes.layers * LATENT_PHASES;
    m.team.run(phases, [&](int thread) {
        m.kernels.enter();
        int phase = 0;
        m.team.phase(phase++, batch.rows, [&](int row) {
            m.kernels.weight_row(m.embedding, batch.tokens[row], x_ + int64_t{row} * m.sizes.hidden, m.sizes.hidden);
        });
        for (int layer = 0; layer < m.sizes.layers; layer++) {
            attend_layer(batch, layer, phase, work + thread * work_floats_);
            if (thread == 0) __atomic_store_n(batch.layers_done, layer + 1, __ATOMIC_RELEASE);  // others may be behind
            compute_layer(batch, layer, phase);
        }
        m.kernels.leave();
    });
    rows_ = batch.rows;
}

// Norm; queries, keys and values; attention; and its projection, added to the residual stream.
void Stepper::attend_layer(const Batch& batch, int index, int& phase, float* memory) {
    Model& m = model_;
    const Kernels& k = m.kernels;
    const Layer& layer = m.layers[size_t(index)];
    const Sizes& s = m.sizes;
    normalize(layer.input_norm, batch.rows, m.number, in_, phase);
    multiply(layer.qkv, in_, batch.rows, qkv_rows_, phase);
    if (s.is_latent()) place_latents(batch, index, phase);
    else m.team.phase(phase++, batch.rows, [&](int row) { place_row(batch, index, row); });

    const AttentionPlan& plan = plans_.at(layer.window);
    const Attention call{&s, &m.arena, batch.slices.data(), index, layer.window, s.score_scale, query_rows_,
                         s.is_latent() ? read_rows_ : attended_rows_, s.is_latent() ? s.value_pad() : s.head_dim,
                         m.number, parts_.reserve_of<float>(0)};
    m.team.phase(phase++, int(plan.items.size()), [&](int item) {
        const size_t next = size_t(item + m.team.threads());  // threads take items roughly in turn
        k.attend(call, plan.items[size_t(item)], next < plan.items.size() ? &plan.items[next] : nullptr, memory);
    });
    m.team.phase(phase++, int(plan.merges.size()),
                 [&](int item) { k.merge_parts(call, plan.merges[size_t(item)], memory); });
    if (s.is_latent()) read_values(layer, batch.rows, phase);
    const Cut o(batch.rows, layer.o, m.cell_bytes());
    const Rows o_in = rounded(layer.o, attended_rows_, batch.rows, phase);
    m.team.phase(phase++, o.items(), [&](int item) {
        k.linear_sum(layer.o, o_in, o.first(item), o.count(item), o.panel(item), x_, s.hidden);
    });
}

// Norm; then the layer's MLP, or the experts that the router chooses for each token.
void Stepper::compute_layer(const Batch& batch, int index, int& phase) {
    const Mlps& mlps = model_.mlps[size_t(index)];
    const float* norm = model_.layers[size_t(index)].mlp_norm;
    normalize(norm, batch.rows, model_.number, in_, phase);
    if (mlps.routed()) route(mlps, norm, batch.rows, phase);
    const Rows in = rounded(mlps.all[0].gate_up, in_, batch.rows, phase);
    if (mlps.routed()) pass_experts(mlps, in, batch.rows, phase);
    else pass(mlps.all[0], in, batch.rows, model_.kernels.linear_sum, x_, phase);
}

// Compute an MLP of rows in the form of products. `finish` writes them to `out` [rows][hidden].
void Stepper::pass(const Mlp& mlp, Rows in, int rows, Product finish, float* out, int& phase) {
    Model& m = model_;
    const int64_t cell = m.cell_bytes();
    const Cut up(rows, mlp.gate_up, cell);
    m.team.phase(phase++, up.items(), [&](int item) {
        m.kernels.linear_gated(mlp.gate_up, in, up.first(item), up.count(item), up.panel(item), gated_rows_);
    });
    const Cut down(rows, mlp.down, cell);
    const Rows down_in = rounded(mlp.down, gated_rows_, rows, phase);
    m.team.phase(phase++, down.items(), [&](int item) {
        finish(mlp.down, down_in, down.first(item), down.count(item), down.panel(item), out, m.sizes.hidden);
    });
}

void Stepper::place_row(const Batch& batch, int index, int row) {
    const Sizes& s = model_.sizes;
    const Layer& layer = model_.layers[size_t(index)];
    const int64_t position = batch.positions[size_t(row)], width = layer.qkv.outputs;
    model_.kernels.place_token(s, layer, qkv_rows_ + row * width, batch.angles + position * s.head_dim, row, query_rows_,
                               model_.arena.number, slot(batch, index, 0, row), slot(batch, index, 1, row));
}

// Return the place of a row's keys, values or latent.
uint8_t* Stepper::slot(const Batch& batch, int layer, int plane, int row) const {
    const int position = batch.positions[size_t(row)], tokens = model_.arena.block_tokens;
    const Slice& slice = batch.slices[size_t(slice_of_row_[size_t(row)])];
    return model_.arena.row(slice.blocks[position / tokens], layer, plane, position % tokens);
}

void Stepper::project(const int32_t* rows, int count, float* logits) {
    Model& m = model_;
    const Sizes& s = m.sizes;
    const int64_t cell = m.cell_bytes(), hidden = padded(s.hidden, INPUTS_ALIGN);
    float* picked = picked_.reserve_of<float>(int64_t{count} * s.hidden);
    for (int i = 0; i < count; i++)
        std::memcpy(picked + int64_t{i} * s.hidden, x_ + int64_t{rows[i]} * s.hidden, size_t(s.hidden) * 4);
    const Rows in{inputs_.reserve(size_t(padded(count, 16) * hidden * cell)), hidden};
    const Cut cut(count, m.head, cell);
    rounded_.reserve(size_t(padded(count, 16) * m.kernels.quant_row_bytes(int(hidden))));
    m.team.run(3, [&](int) {
        m.kernels.enter();
        int phase = 0;
        m.team.phase(phase++, norm_items(count), [&](int item) {
            const int first = item * NORM_ROWS, size = std::min(NORM_ROWS, count - first);
            m.kernels.normalize_rows(picked, s.hidden, s.hidden, m.final_norm, s.rms_eps, first, size, m.number, in);
        });
        const Rows head_in = rounded(m.head, in, count, phase);
        m.team.phase(phase++, cut.items(), [&](int item) {
            m.kernels.linear(m.head, head_in, cut.first(item), cut.count(item), cut.panel(item), logits, s.vocab);
        });
        m.kernels.leave();
    });
}

void Stepper::read(const int32_t* rows, int count, float* hidden) const {
    const Sizes& s = model_.sizes;
    for (int i = 0; i < count; i++) {
        const float* row = x_ + int64_t{rows[i]} * s.hidden;
        double squares = 0;
        for (int j = 0; j < s.hidden; j++) squares += double(row[j]) * double(row[j]);
        const float scale = float(1.0 / std::sqrt(squares / s.hidden + double(s.rms_eps)));
        for (int j = 0; j < s.hidden; j++) hidden[int64_t{i} * s.hidden + j] = row[j] * scale * model_.final_norm[j];
    }
}

}  // namespace baton
