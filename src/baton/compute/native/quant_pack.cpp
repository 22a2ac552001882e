// Pack quantized weights into panels when a model is loaded.
#include <cstring>

#include "model.h"
#include "quant.h"

namespace baton {
namespace {

template <class Format>
void pack_quant_panel(const QuantMatrix& matrix, int panel, uint8_t* out) {
    const int groups = matrix.shape.inputs / QUANT_GROUP;
    for (int lane = 0; lane < PANEL; lane++) {
        const int row = source_row(matrix.shape, panel * PANEL + lane);
        if (row < 0) continue;  // the memory is zeroed, and so are the scales
        const uint8_t* codes = static_cast<const uint8_t*>(matrix.shape.data) + int64_t{row} * matrix.shape.inputs;
        for (int group = 0; group < groups; group++) {
            uint8_t* to = out + int64_t{group} * Format::GROUP_BYTES;
            const int64_t at = int64_t{row} * groups + group;
            if (!Format::CHANNEL) std::memcpy(to + lane * 2, static_cast<const uint16_t*>(matrix.scales) + at, 2);
            if (Format::MINIMUM) std::memcpy(to + Format::SCALES_BYTES + lane * 2, matrix.minimums + at, 2);
            for (int i = 0; i < QUANT_GROUP; i++)
                to[Format::code_at(lane, i)] |=
                    uint8_t(codes[group * QUANT_GROUP + i] << (Format::NIBBLES && i >= 16 ? 4 : 0));
        }
        if (Format::CHANNEL)
            std::memcpy(out + int64_t{groups} * Format::GROUP_BYTES + lane * 4,
                        static_cast<const float*>(matrix.scales) + row, 4);
    }
}

}  // namespace

Linear pack_quant(Model& model, const QuantMatrix& matrix) {
    Linear linear;
    linear.dtype = matrix.dtype;
    linear.rows_dtype = model.dtype;
    linear.outputs = matrix.shape.outputs();
    linear.inputs = matrix.shape.inputs;
    const int panels = linear.panel_count();
    with_format(matrix.dtype, [&](auto format) {
        using Format = decltype(format);
        const int64_t bytes = Format::panel_bytes(linear.inputs);
        uint8_t* data = model.weights.allocate<uint8_t>(bytes * panels);
        linear.panels = data;
        model.thread_pool.run(1, [&](int) {
            model.thread_pool.phase(0, panels,
                                    [&](int panel) { pack_quant_panel<Format>(matrix, panel, data + panel * bytes); });
        });
    });
    linear.bias = pack_bias(model, matrix.shape, panels);
    return linear;
}

}  // namespace baton
