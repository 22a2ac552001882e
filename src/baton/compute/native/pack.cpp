// Pack weights into panels when a model is loaded.
#include <cstring>

#include "model.h"

namespace baton {

namespace {
constexpr int NO_ROW = -1;
}

int source_row(const Matrix& matrix, int panel_row) {
    if (!matrix.interleaved) return panel_row < matrix.rows ? panel_row : NO_ROW;
    const int half = matrix.rows / 2, lane = panel_row % PANEL;
    const int row = panel_row / PANEL * (PANEL / 2) + lane % (PANEL / 2);
    if (row >= half) return NO_ROW;
    return lane < PANEL / 2 ? row : half + row;
}

namespace {

// `step` inputs of a row are adjacent: 1 for float32, 2 for bfloat16.
template <class Element>
void pack_panel(const Matrix& matrix, int panel, int inputs, int step, Element* out) {
    for (int lane = 0; lane < PANEL; lane++) {
        const int row = source_row(matrix, panel * PANEL + lane);
        if (row == NO_ROW) continue;  // the memory is zeroed
        const Element* in = static_cast<const Element*>(matrix.data) + int64_t{row} * matrix.inputs;
        Element* to = out + int64_t{panel} * PANEL * inputs + lane * step;
        for (int k = 0; k < matrix.inputs; k++) to[int64_t{k / step} * PANEL * step + k % step] = in[k];
    }
}

}  // namespace

const float* copy_values(Model& model, const float* values, int count) {
    if (values == nullptr) return nullptr;
    float* kept = model.weights.allocate<float>(count);
    std::memcpy(kept, values, size_t(count) * 4);
    return kept;
}

Linear pack(Model& model, const Matrix& matrix, DType dtype) {
    Linear linear;
    linear.dtype = linear.rows_dtype = dtype;
    linear.outputs = matrix.outputs();
    linear.inputs = padded(matrix.inputs, INPUTS_ALIGN);
    const int panels = linear.panel_count();
    const int64_t elements = int64_t{panels} * PANEL * linear.inputs;
    const int64_t element_bytes = linear.dtype == DType::BF16 ? 2 : 4;
    void* data = model.weights.allocate<uint8_t>(elements * element_bytes);
    linear.panels = data;
    model.thread_pool.run(1, [&](int) {
        model.thread_pool.phase(0, panels, [&](int panel) {
            if (linear.dtype == DType::BF16) pack_panel(matrix, panel, linear.inputs, 2, static_cast<bf16*>(data));
            else pack_panel(matrix, panel, linear.inputs, 1, static_cast<float*>(data));
        });
    });
    linear.bias = pack_bias(model, matrix, panels);
    return linear;
}

const float* pack_bias(Model& model, const Matrix& matrix, int panels) {
    if (matrix.bias == nullptr) return nullptr;
    float* bias = model.weights.allocate<float>(int64_t{panels} * PANEL);
    for (int panel_row = 0; panel_row < panels * PANEL; panel_row++)
        if (const int row = source_row(matrix, panel_row); row != NO_ROW) bias[panel_row] = matrix.bias[row];
    return bias;
}

}  // namespace baton
