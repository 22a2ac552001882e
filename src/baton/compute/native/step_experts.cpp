// The part of a step for layers with experts. A row's bits depend on this row only: the kernels give the same bits in
// every row block, and the results of a token are summed in the order of its expert probabilities.
#include <algorithm>
#include <cstring>

#include "step.h"

namespace baton {

// Return the rows of the grouped GEMM: every token has one per chosen expert.
int Stepper::reserve_experts(int rows) {
    const Model& m = model_;
    const int64_t hidden = padded(m.sizes.hidden, INPUTS_ALIGN);
    const int64_t row_bytes = std::max(hidden * m.element_bytes(), m.kernels.quant_row_bytes(int(hidden)));
    int expert_rows = rows;
    for (const Mlps& mlps : m.mlps) {
        if (!mlps.routed()) continue;
        assignment_.reserve(mlps, rows, expert_block_rows(mlps));
        expert_rows = std::max(expert_rows, rows * mlps.experts_per_token);
        f32_inputs_.reserve_of<float>(rows * hidden);
        scores_.reserve_of<float>(int64_t{rows} * mlps.router.outputs);
        gathered_.reserve(size_t(padded(rows * mlps.experts_per_token, 16) * row_bytes));
        results_.reserve_of<float>(int64_t{rows} * mlps.mlps_per_token() * m.sizes.hidden);
    }
    return expert_rows;
}

int Stepper::expert_block_rows(const Mlps& mlps) const {
    const Mlp& expert = mlps.all[0];
    return rows_per_block(std::max(expert.gate_up.inputs, expert.down.inputs), model_.element_bytes());
}

// Score the experts in float32, because rounding could create ties and change the choice.
void Stepper::route(const Mlps& mlps, const float* norm, int rows, int& phase) {
    Model& m = model_;
    Rows f32_rows = gemm_in_;
    if (m.dtype != DType::F32) {
        f32_rows.data = f32_inputs_.reserve_of<float>(0);
        rms_norm(norm, rows, DType::F32, f32_rows, phase);
    }
    float* const scores = scores_.reserve_of<float>(0);
    const GemmTiling tiling(rows, mlps.router, 4, m.thread_pool.threads());
    m.thread_pool.phase(phase++, tiling.items(), [&](int item) {
        m.kernels.linear(mlps.router, f32_rows, tiling.at(item), scores, mlps.router.outputs);
    });
    m.thread_pool.phase(phase++, row_items(rows), [&](int item) {
        for (int row = item * ROWS_PER_ITEM; row < std::min(rows, (item + 1) * ROWS_PER_ITEM); row++)
            choose_experts(mlps, scores + int64_t{row} * mlps.router.outputs, row, assignment_);
    });
    m.thread_pool.phase(phase++, 1, [&](int) { assign_rows(mlps, rows, expert_block_rows(mlps), assignment_); });
}

// Compute the experts as a grouped GEMM, then sum each token's results weighted, in the order of its chosen experts.
void Stepper::compute_experts(const Mlps& mlps, Rows in, int rows, int& phase) {
    Model& m = model_;
    const Kernels& k = m.kernels;
    const Mlp& first_expert = mlps.all[0];  // all experts of a layer have the same shape
    const int hidden = m.sizes.hidden, expert_rows = rows * mlps.experts_per_token;
    // The number of items of the worst case, so that a late thread, which may see another list, counts the same items.
    const int row_blocks = row_blocks_max(mlps, rows, expert_block_rows(mlps));
    const auto for_each_row_block = [&](int panels, auto compute) {
        m.thread_pool.phase(phase++, row_blocks * panels, [&](int item) {
            const RowBlock* block = assignment_.row_block(item / panels);
            const int panel = item % panels, next = panel + m.thread_pool.threads();
            if (block != nullptr)
                compute(block->expert, PanelItem{block->first, block->count, panel, next < panels ? next : NO_PANEL});
        });
    };
    float* const results = results_.reserve_of<float>(0);
    const Rows gathered = gather(first_expert, in, expert_rows, phase);
    if (mlps.shared()) compute_mlp(mlps.all.back(), in, rows, k.linear, results + int64_t{expert_rows} * hidden, phase);
    for_each_row_block(first_expert.gate_up.panel_count(), [&](int expert, const PanelItem& item) {
        k.linear_gated(mlps.all[size_t(expert)].gate_up, gathered, item, gated_rows_);
    });
    const Rows down_in = quantized_rows(first_expert.down, gated_rows_, expert_rows, phase);
    for_each_row_block(first_expert.down.panel_count(), [&](int expert, const PanelItem& item) {
        k.linear(mlps.all[size_t(expert)].down, down_in, item, results, hidden);
    });
    m.thread_pool.phase(phase++, row_items(rows), [&](int item) {
        for (int row = item * ROWS_PER_ITEM; row < std::min(rows, (item + 1) * ROWS_PER_ITEM); row++) {
            const size_t at = size_t(row * mlps.mlps_per_token());
            k.add_weighted_rows(residual_ + int64_t{row} * hidden, hidden, results, &assignment_.places[at],
                                &assignment_.weights[at], mlps.mlps_per_token());
        }
    });
}

// Copy every token's row to its places in the grouped GEMM.
Rows Stepper::gather(const Mlp& expert, Rows in, int places, int& phase) {
    const Linear& w = expert.gate_up;
    const int64_t row_bytes =
        is_quantized(w.dtype) ? model_.kernels.quant_row_bytes(w.inputs) : in.stride * model_.element_bytes();
    const uint8_t* const from = static_cast<const uint8_t*>(in.data);
    uint8_t* const to = gathered_.reserve_of<uint8_t>(0);
    model_.thread_pool.phase(phase++, row_items(places), [&](int item) {
        for (int place = item * ROWS_PER_ITEM; place < std::min(places, (item + 1) * ROWS_PER_ITEM); place++)
            std::memcpy(to + place * row_bytes, from + assignment_.rows[size_t(place)] * row_bytes, size_t(row_bytes));
    });
    return {to, in.stride};
}

}  // namespace baton
