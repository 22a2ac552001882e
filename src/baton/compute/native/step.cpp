#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>


namespace baton {
namespace {

constexpr int DENSE_PHASES = 13, EXPERTS_PHASES = 22, LATENT_PHASES = 5;  // of a layer; latent attention adds its own

}  // namespace

void Stepper::reserve(int rows) {
    const Sizes& s = model_.sizes;
    const Layer& layer = model_.layers[0];  // attention has the same sizes in all layers
    const int64_t element_bytes = model_.element_bytes(), hidden = padded(s.hidden, INPUTS_ALIGN);
    const int64_t heads = layer.o.inputs;
    const int64_t narrow = padded(s.latent.q_rank, INPUTS_ALIGN);
    int gated = 0;
    for (const Mlps& mlps : model_.mlps)
        gated = std::max({gated, mlps.all.front().down.inputs, mlps.all.back().down.inputs});
    const int64_t n = padded(rows, 16);  // an AMX tile reads 16 rows
    const int64_t expert_rows = padded(reserve_experts(rows), 16);
    residual_ = hidden_.reserve_of<float>(n * s.hidden);
    qkv_rows_ = qkv_.reserve_of<float>(n * layer.qkv.outputs);
    gemm_in_ = {inputs_.reserve(size_t(n * hidden * element_bytes)), hidden};
    attention_out_rows_ = {attention_out_.reserve(size_t(n * heads * element_bytes)), heads};
    const int64_t widest = std::max({hidden, heads, narrow, int64_t{gated}});
    quantized_.reserve(size_t(expert_rows * model_.kernels.quant_row_bytes(int(widest))));
    gated_rows_ = {gated_.reserve(size_t(expert_rows * gated * element_bytes)), gated};
    const DType dtype = model_.dtype == DType::BF16 && model_.arena.dtype != DType::F32 ? DType::BF16 : DType::F32;
    const int64_t query_bytes = int64_t{s.heads} * s.head_pad() * (dtype == DType::BF16 ? 2 : 4);
    query_rows_ = {queries_.reserve(size_t((n + 16) * query_bytes)), dtype, rows};
    if (s.is_latent()) reserve_latent(rows);
}

// Return the activations as the GEMM reads them: quantized to 8 bits if the weights are quantized.
Rows Stepper::quantized_rows(const Linear& w, Rows in, int rows, int& phase) {
    if (!is_quantized(w.dtype)) return in;
    void* out = quantized_.reserve_of<uint8_t>(0);
    model_.thread_pool.phase(phase++, row_items(rows), [&](int item) {
        const int first = item * ROWS_PER_ITEM, count = std::min(ROWS_PER_ITEM, rows - first);
        model_.kernels.quantize_rows(in, w.rows_dtype, w.inputs, first, count, out);
    });
    return {out, 0};
}

GemmTiling Stepper::tile(const Linear& w, int rows) const {
    return GemmTiling(rows, w, model_.element_bytes(), model_.thread_pool.threads());
}

// out [rows][outputs] = in x w. in: as the GEMM reads them.
void Stepper::multiply(const Linear& w, Rows in, int rows, float* out, int& phase) {
    const GemmTiling tiling = tile(w, rows);
    model_.thread_pool.phase(phase++, tiling.items(),
                             [&](int item) { model_.kernels.linear(w, in, tiling.at(item), out, w.outputs); });
}

// RMSNorm of rows of the residual stream.
void Stepper::rms_norm(const float* weight, int rows, DType dtype, Rows out, int& phase) {
    const Sizes& s = model_.sizes;
    model_.thread_pool.phase(phase++, row_items(rows), [&](int item) {
        const int first = item * ROWS_PER_ITEM, count = std::min(ROWS_PER_ITEM, rows - first);
        model_.kernels.rms_norm_rows(residual_, s.hidden, s.hidden, weight, s.rms_eps, first, count, dtype, out);
    });
}

// RMSNorm of the residual stream for the GEMM with `w`. Return the rows as this GEMM reads them; gemm_in_ has them in
// the model's type. Norm and quantization of a row are one item: a phase less to wait for.
Rows Stepper::normed_rows(const float* weight, const Linear& w, int rows, int& phase) {
    const Sizes& s = model_.sizes;
    const Kernels& k = model_.kernels;
    void* const quantized = is_quantized(w.dtype) ? quantized_.reserve_of<uint8_t>(0) : nullptr;
    model_.thread_pool.phase(phase++, row_items(rows), [&](int item) {
        const int first = item * ROWS_PER_ITEM, count = std::min(ROWS_PER_ITEM, rows - first);
        k.rms_norm_rows(residual_, s.hidden, s.hidden, weight, s.rms_eps, first, count, model_.dtype, gemm_in_);
        if (quantized != nullptr) k.quantize_rows(gemm_in_, w.rows_dtype, w.inputs, first, count, quantized);
    });
    return quantized != nullptr ? Rows{quantized, 0} : gemm_in_;
}

void Stepper::plan(const Batch& batch) {
    plans_.clear();
    slice_of_row_.resize(size_t(batch.rows));
    for (size_t slice = 0; slice < batch.slices.size(); slice++)
        for (int i = 0; i < batch.slices[slice].count; i++)
            slice_of_row_[size_t(batch.slices[slice].first + i)] = int32_t(slice);
    places_.assign(size_t(batch.rows), NO_PLACE);
    int32_t place = 0;
    for (const Slice& slice : batch.read_slices)
        for (int i = 0; i < slice.count; i++) places_[size_t(slice.first + i)] = place++;
    int64_t partials = 0;
    int rows = 1, states = 1;
    const auto planned = [&](const std::vector<Slice>& slices, int window) {
        AttentionPlan plan = plan_attention(model_.sizes, slices, window, model_.thread_pool.threads());
        partials = std::max(partials, plan.partials);
        rows = std::max(rows, plan.rows_max);
        states = std::max(states, plan.states_max);
        return plan;
    };
    for (const Layer& layer : model_.layers)
        if (plans_.count(layer.window) == 0) plans_[layer.window] = planned(batch.slices, layer.window);
    read_plan_ = planned(batch.read_slices, model_.layers.back().window);
    partials_.reserve_of<float>(partials * (2 + model_.sizes.value_pad()));
    scratch_floats_ = padded(int(model_.kernels.attention_floats(model_.sizes, rows, states)), 16);
    scratch_.reserve_of<float>(scratch_floats_ * model_.thread_pool.threads());
}

void Stepper::forward(const Batch& batch) {
    rows_ = 0;
    reserve(batch.rows);
    plan(batch);
    Model& m = model_;
    float* scratch = scratch_.reserve_of<float>(0);
    int phases = 2;
    for (const Mlps& mlps : m.mlps) phases += mlps.routed() ? EXPERTS_PHASES : DENSE_PHASES;
    if (m.sizes.is_latent()) phases += m.sizes.layers * LATENT_PHASES;
    m.thread_pool.run(phases, [&](int thread) {
        m.kernels.enter();
        int phase = 0;
        m.thread_pool.phase(phase++, batch.rows, [&](int row) {
            m.kernels.unpack_weight_row(m.embedding, batch.tokens[row], residual_ + int64_t{row} * m.sizes.hidden,
                                        m.sizes.hidden);
        });
        for (int layer = 0; layer < m.sizes.layers; layer++) {
            attention_layer(batch, layer, phase, scratch + thread * scratch_floats_);
            // Every item of the attention is done here, though other threads may still have to leave its last phase.
            if (thread == 0) __atomic_store_n(batch.layers_done, layer + 1, __ATOMIC_RELEASE);
            mlp_layer(batch, layer, phase);
        }
        m.kernels.leave();
    });
    rows_ = batch.rows;
}

// Norm; QKV projection; RoPE and KV write; attention; output projection, added to the residual stream.
void Stepper::attention_layer(const Batch& batch, int index, int& phase, float* memory) {
    Model& m = model_;
    const Kernels& k = m.kernels;
    const Layer& layer = m.layers[size_t(index)];
    const Sizes& s = m.sizes;
    const Rows in = normed_rows(layer.input_norm, layer.qkv, batch.rows, phase);
    multiply(layer.qkv, in, batch.rows, qkv_rows_, phase);
    if (s.is_latent()) rope_and_write_latents(batch, index, phase);
    else m.thread_pool.phase(phase++, batch.rows, [&](int row) { rope_and_write_row(batch, index, row); });

    const bool is_last = index == s.layers - 1;
    const int rows = rows_of(batch, index);
    if (rows == 0) return;
    const AttentionPlan& plan = is_last ? read_plan_ : plans_.at(layer.window);
    const std::vector<Slice>& slices = is_last ? batch.read_slices : batch.slices;
    const Attention call{&s, &m.arena, slices.data(), index, layer.window, s.score_scale, query_rows_,
                         s.is_latent() ? latent_out_rows_ : attention_out_rows_,
                         s.is_latent() ? s.value_pad() : s.head_dim, m.dtype, partials_.reserve_of<float>(0)};
    m.thread_pool.phase(phase++, int(plan.items.size()), [&](int item) {
        const size_t next = size_t(item + m.thread_pool.threads());  // threads claim items roughly in turn
        k.attend(call, plan.items[size_t(item)], next < plan.items.size() ? &plan.items[next] : nullptr, memory);
    });
    m.thread_pool.phase(phase++, int(plan.merges.size()),
                        [&](int item) { k.merge_partials(call, plan.merges[size_t(item)], memory); });
    if (rows < batch.rows) m.thread_pool.phase(phase++, 1, [&](int) { gather_read_rows(batch, call.out); });
    if (s.is_latent()) project_values(layer, rows, phase);
    const GemmTiling o = tile(layer.o, rows);
    const Rows o_in = quantized_rows(layer.o, attention_out_rows_, rows, phase);
    m.thread_pool.phase(phase++, o.items(), [&](int item) {
        k.linear_sum(layer.o, o_in, o.at(item), residual_, s.hidden);
    });
}

// Return the rows that a layer computes once its keys and values are written.
int Stepper::rows_of(const Batch& batch, int layer) const {
    return layer == model_.sizes.layers - 1 ? batch.rows_read : batch.rows;
}

// Move the rows that are read after the step to the front of the residual stream and of `out`, the last layer's
// attention output.
void Stepper::gather_read_rows(const Batch& batch, Rows out) {
    const int64_t hidden = model_.sizes.hidden, out_bytes = out.stride * model_.element_bytes();
    uint8_t* const bytes = static_cast<uint8_t*>(out.data);
    for (int row = 0; row < batch.rows; row++) {  // a place is never behind its row
        const int64_t place = places_[size_t(row)];
        if (place == NO_PLACE || place == row) continue;
        std::memcpy(residual_ + place * hidden, residual_ + row * hidden, size_t(hidden) * 4);
        std::memcpy(bytes + place * out_bytes, bytes + row * out_bytes, size_t(out_bytes));
    }
}

// Norm; then the layer's MLP or its experts, added to the residual stream.
void Stepper::mlp_layer(const Batch& batch, int index, int& phase) {
    const int rows = rows_of(batch, index);
    if (rows == 0) return;
    const Mlps& mlps = model_.mlps[size_t(index)];
    const float* norm = model_.layers[size_t(index)].mlp_norm;
    const Rows in = normed_rows(norm, mlps.all[0].gate_up, rows, phase);
    if (mlps.routed()) route(mlps, norm, rows, phase);
    if (mlps.routed()) compute_experts(mlps, in, rows, phase);
    else compute_mlp(mlps.all[0], in, rows, model_.kernels.linear_sum, residual_, phase);
}

// Compute an MLP. `finish` is the kernel of the down projection: it writes or adds to `out` [rows][hidden].
void Stepper::compute_mlp(const Mlp& mlp, Rows in, int rows, PanelKernel finish, float* out, int& phase) {
    Model& m = model_;
    const GemmTiling up = tile(mlp.gate_up, rows);
    m.thread_pool.phase(phase++, up.items(), [&](int item) {
        m.kernels.linear_gated(mlp.gate_up, in, up.at(item), gated_rows_);
    });
    const GemmTiling down = tile(mlp.down, rows);
    const Rows down_in = quantized_rows(mlp.down, gated_rows_, rows, phase);
    m.thread_pool.phase(phase++, down.items(), [&](int item) {
        finish(mlp.down, down_in, down.at(item), out, m.sizes.hidden);
    });
}

void Stepper::rope_and_write_row(const Batch& batch, int index, int row) {
    const Sizes& s = model_.sizes;
    const Layer& layer = model_.layers[size_t(index)];
    const int64_t position = batch.positions[size_t(row)], width = layer.qkv.outputs;
    model_.kernels.rope_and_write_kv(s, layer, qkv_rows_ + row * width, batch.angles + position * s.head_dim, row,
                                     query_rows_, model_.arena.dtype, slot(batch, index, 0, row),
                                     slot(batch, index, 1, row));
}

// Return the slot of a row's keys, values or latent in its KV block.
uint8_t* Stepper::slot(const Batch& batch, int layer, int plane, int row) const {
    const int position = batch.positions[size_t(row)], tokens = model_.arena.block_tokens;
    const Slice& slice = batch.slices[size_t(slice_of_row_[size_t(row)])];
    return model_.arena.row(slice.blocks[position / tokens], layer, plane, position % tokens);
}

void Stepper::project(const int32_t* rows, int count, float* logits) {
    Model& m = model_;
    const Sizes& s = m.sizes;
    const int64_t element_bytes = m.element_bytes(), hidden = padded(s.hidden, INPUTS_ALIGN);
    float* selected = selected_.reserve_of<float>(int64_t{count} * s.hidden);
    for (int i = 0; i < count; i++)
        std::memcpy(selected + int64_t{i} * s.hidden, hidden_row(rows[i]), size_t(s.hidden) * 4);
    const Rows in{inputs_.reserve(size_t(padded(count, 16) * hidden * element_bytes)), hidden};
    const GemmTiling tiling = tile(m.head, count);
    quantized_.reserve(size_t(padded(count, 16) * m.kernels.quant_row_bytes(int(hidden))));
    m.thread_pool.run(3, [&](int) {
        m.kernels.enter();
        int phase = 0;
        m.thread_pool.phase(phase++, row_items(count), [&](int item) {
            const int first = item * ROWS_PER_ITEM, size = std::min(ROWS_PER_ITEM, count - first);
            m.kernels.rms_norm_rows(selected, s.hidden, s.hidden, m.final_norm, s.rms_eps, first, size, m.dtype, in);
        });
        const Rows head_in = quantized_rows(m.head, in, count, phase);
        m.thread_pool.phase(phase++, tiling.items(), [&](int item) {
            m.kernels.linear(m.head, head_in, tiling.at(item), logits, s.vocab);
        });
        m.kernels.leave();
    });
}

void Stepper::read_hidden(const int32_t* rows, int count, float* hidden) const {
    const Sizes& s = model_.sizes;
    for (int i = 0; i < count; i++) {
        const float* row = hidden_row(rows[i]);
        double squares = 0;
        for (int j = 0; j < s.hidden; j++) squares += double(row[j]) * double(row[j]);
        const float scale = float(1.0 / std::sqrt(squares / s.hidden + double(s.rms_eps)));
        for (int j = 0; j < s.hidden; j++) hidden[int64_t{i} * s.hidden + j] = row[j] * scale * model_.final_norm[j];
    }
}

}  // namespace baton
