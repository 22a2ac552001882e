// Pack weights into panels when a model is loaded.
#include <cstring>

#include "model.h"

namespace baton {

// Return the row of the matrix at a place of the panels, or NO_ROW for padding.
namespace {
constexpr int NO_ROW = -1;
}

int row_at(const Matrix& matrix, int place) {
    if (!matrix.interleaved) return place < matrix.rows ? place : NO_ROW;
    const int half = matrix.rows / 2, lane = place % PANEL;
    const int row = place / PANEL * (PANEL / 2) + lane % (PANEL / 2);
    if (row >= half) return NO_ROW;
    return lane < PANEL / 2 ? row : half + row;
}

namespace {

// `step` inputs of a row are adjacent: 1 for float32, 2 for bfloat16.
template <class Cell>
void pack_panel(const Matrix& matrix, int panel, int inputs, int step, Cell* out) {
    for (int lane = 0; lane < PANEL; lane++) {
        const int row = row_at(matrix, panel * PANEL + lane);
        if (row == NO_ROW) continue;  // the memory is zeroed
        const Cell* in = static_cast<const Cell*>(matrix.data) + int64_t{row} * matrix.inputs;
        Cell* to = out + int64_t{panel} * PANEL * inputs + lane * step;
        for (int k = 0; k < matrix.inputs; k++) to[int64_t{k / step} * PANEL * step + k % step] = in[k];
    }
}

}  // namespace

const float* keep(Model& model, const float* values, int count) {
    if (values == nullptr) return nullptr;
    float* kept = model.weights.take<float>(count);
    std::memcpy(kept, values, size_t(count) * 4);
    return kept;
}

Linear pack(Model& model, const Matrix& matrix, Number number) {
    Linear linear;
    linear.number = linear.rows_number = number;
    linear.outputs = matrix.outputs();
    linear.inputs = padded(matrix.inputs, INPUTS_ALIGN);
    const int panels = linear.panel_count();
    const int64_t cells = int64_t{panels} * PANEL * linear.inputs;
    const int64_t cell_bytes = linear.number == Number::BF16 ? 2 : 4;
    void* data = model.weights.take<uint8_t>(cells * cell_bytes);
    linear.panels = data;
    model.team.run(1, [&](int) {
        model.team.phase(0, panels, [&](int panel) {
            if (linear.number == Number::BF16) pack_panel(matrix, panel, linear.inputs, 2, static_cast<bf16*>(data));
            else pack_panel(matrix, panel, linear.inputs, 1, static_cast<float*>(data));
        });
    });
    linear.bias = pack_bias(model, matrix, panels);
    return linear;
}

const float* pack_bias(Model& model, const Matrix& matrix, int panels) {
    if (matrix.bias == nullptr) return nullptr;
    float* bias = model.weights.take<float>(int64_t{panels} * PANEL);
    for (int place = 0; place < panels * PANEL; place++)
        if (const int row = row_at(matrix, place); row != NO_ROW) bias[place] = matrix.bias[row];
    return bias;
}

}  // namespace baton
