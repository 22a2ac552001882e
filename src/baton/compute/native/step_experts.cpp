// The part of a step for layers with experts. A row's bits depend on this row only: the kernels give the same bits in
// every portion, and the results of a token are summed in the order of the token's choice.
#include <algorithm>
#include <cstring>

#include "cut.h"
#include "step.h"

namespace baton {

// Return the maximum number of rows of all experts together: every token has a row per chosen expert.
int Stepper::reserve_experts(int rows) {
    const Model& m = model_;
    const int64_t hidden = padded(m.sizes.hidden, INPUTS_ALIGN);
    const int64_t row_bytes = std::max(hidden * m.cell_bytes(), m.kernels.quant_row_bytes(int(hidden)));
    int dealt = rows;
    for (const Mlps& mlps : m.mlps) {
        if (!mlps.routed()) continue;
        deal_.reserve(mlps, rows, portion_rows(mlps));
        dealt = std::max(dealt, rows * mlps.used);
        exact_.reserve_of<float>(rows * hidden);
        scores_.reserve_of<float>(int64_t{rows} * mlps.router.outputs);
        gathered_.reserve(size_t(padded(rows * mlps.used, 16) * row_bytes));
        results_.reserve_of<float>(int64_t{rows} * mlps.choices() * m.sizes.hidden);
    }
    return dealt;
}

int Stepper::portion_rows(const Mlps& mlps) const {
    const Mlp& expert = mlps.all[0];
    return block_rows(std::max(expert.gate_up.inputs, expert.down.inputs), model_.cell_bytes());
}

// Score the experts in float32, because rounding could create ties and change the choice.
void Stepper::route(const Mlps& mlps, const float* norm, int rows, int& phase) {
    Model& m = model_;
    Rows exact = in_;
    if (m.number != Number::F32) {
        exact.data = exact_.reserve_of<float>(0);
        normalize(norm, rows, Number::F32, exact, phase);
    }
    float* const scores = scores_.reserve_of<float>(0);
    const Cut cut(rows, mlps.router, 4);
    m.team.phase(phase++, cut.items(), [&](int item) {
        m.kernels.linear(mlps.router, exact, cut.first(item), cut.count(item), cut.panel(item), scores,
                         mlps.router.outputs);
    });
    m.team.phase(phase++, norm_items(rows), [&](int item) {
        for (int row = item * NORM_ROWS; row < std::min(rows, (item + 1) * NORM_ROWS); row++)
            choose(mlps, scores + int64_t{row} * mlps.router.outputs, row, deal_);
    });
    m.team.phase(phase++, 1, [&](int) { deal_out(mlps, rows, portion_rows(mlps), deal_); });
}

// Every expert computes its tokens as rows of one product. A token's results are summed in the order of its choice.
void Stepper::pass_experts(const Mlps& mlps, Rows in, int rows, int& phase) {
    Model& m = model_;
    const Kernels& k = m.kernels;
    const Mlp& any = mlps.all[0];  // all experts of a layer have the same shape
    const int hidden = m.sizes.hidden, dealt = rows * mlps.used;
    // The number of items for the worst choice, so that a late thread counts the same items as the others.
    const int portions = portions_max(mlps, rows, portion_rows(mlps));
    const auto each_portion = [&](int panels, auto compute) {
        m.team.phase(phase++, portions * panels, [&](int item) {
            if (const Portion* portion = deal_.portion(item / panels)) compute(*portion, item % panels);
        });
    };
    float* const results = results_.reserve_of<float>(0);
    const Rows gathered = gather(any, in, dealt, phase);
    if (mlps.shared()) pass(mlps.all.back(), in, rows, k.linear, results + int64_t{dealt} * hidden, phase);
    each_portion(any.gate_up.panel_count(), [&](const Portion& p, int panel) {
        k.linear_gated(mlps.all[size_t(p.expert)].gate_up, gathered, p.first, p.count, panel, gated_rows_);
    });
    const Rows down_in = rounded(any.down, gated_rows_, dealt, phase);
    each_portion(any.down.panel_count(), [&](const Portion& p, int panel) {
        k.linear(mlps.all[size_t(p.expert)].down, down_in, p.first, p.count, panel, results, hidden);
    });
    m.team.phase(phase++, norm_items(rows), [&](int item) {
        for (int row = item * NORM_ROWS; row < std::min(rows, (item + 1) * NORM_ROWS); row++) {
            const size_t at = size_t(row * mlps.choices());
            k.add_weighted(x_ + int64_t{row} * hidden, hidden, results, &deal_.places[at], &deal_.weights[at],
                           mlps.choices());
        }
    });
}

// Copy every token's row, in the form of products, to its places.
Rows Stepper::gather(const Mlp& expert, Rows in, int places, int& phase) {
    const Linear& w = expert.gate_up;
    const int64_t row_bytes = is_quantized(w.number) ? model_.kernels.quant_row_bytes(w.inputs)
                                                     : in.stride * model_.cell_bytes();
    const uint8_t* const from = static_cast<const uint8_t*>(in.data);
    uint8_t* const to = gathered_.reserve_of<uint8_t>(0);
    model_.team.phase(phase++, norm_items(places), [&](int item) {
        for (int place = item * NORM_ROWS; place < std::min(places, (item + 1) * NORM_ROWS); place++)
            std::memcpy(to + place * row_bytes, from + deal_.rows[size_t(place)] * row_bytes, size_t(row_bytes));
    });
    return {to, in.stride};
}

}  // namespace baton
