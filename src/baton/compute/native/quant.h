// Quantized weights of 4 and 8 bits, multiplied in stored form with activations quantized to 8 bits.
// A group is 32 inputs with a common scale (a block of ggml). Products of a group are summed exactly in integers;
// groups are added in order as floats. Every row has its own scales, so that a row's bits do not depend on the other
// rows.
// Source: the formats Q8_0, Q4_0 and Q4_1 of ggml (ggml-common.h). The layout in panels is our own.
#pragma once
#include "simd.h"

namespace baton {
namespace {

constexpr int QUANT_GROUP = 32;         // inputs with a common scale
constexpr int QUADS = QUANT_GROUP / 4;  // 4 inputs each, one dot instruction

// A row of activations: [inputs] int8, then for each group its scale, the sum of its numbers, and the product of both.
struct QuantRow {
    const int8_t* numbers;
    const float* scales;
    const int32_t* sums;
    const float* scaled_sums;

    static int64_t bytes(int inputs) { return padded(inputs + inputs / QUANT_GROUP * 12, 64); }
    QuantRow(const void* rows, int inputs, int64_t row) {
        numbers = static_cast<const int8_t*>(rows) + row * bytes(inputs);
        scales = reinterpret_cast<const float*>(numbers + inputs);
        sums = reinterpret_cast<const int32_t*>(scales + inputs / QUANT_GROUP);
        scaled_sums = reinterpret_cast<const float*>(sums + inputs / QUANT_GROUP);
    }
};

// The layout of a panel of weights. Per group: [32] float16 scales, [32] float16 minimums if the format has them, then
// 8 bits: [input / 4][32][4]; 4 bits: [input / 4 of the first 16][32][4], inputs 16 .. 31 in the upper halves.
// A weight is scale * (code - ZERO) + minimum. Per-channel weights have float32 scales [32] at the end, none per group.
template <int BITS, int ZERO_CODE, bool WITH_MINIMUM, bool PER_CHANNEL>
struct QuantFormat {
    static constexpr int ZERO = ZERO_CODE;
    static constexpr bool NIBBLES = BITS == 4, MINIMUM = WITH_MINIMUM, CHANNEL = PER_CHANNEL;
    static constexpr int SCALES_BYTES = PER_CHANNEL ? 0 : PANEL * 2;
    static constexpr int CODES_AT = SCALES_BYTES + (WITH_MINIMUM ? PANEL * 2 : 0);
    static constexpr int GROUP_BYTES = CODES_AT + PANEL * QUANT_GROUP * BITS / 8;

    static int64_t panel_bytes(int inputs) {
        return int64_t{inputs / QUANT_GROUP} * GROUP_BYTES + (PER_CHANNEL ? PANEL * 4 : 0);
    }
    // Return the offset of the code of an input of a group, for one output of the panel.
    static int code_at(int lane, int input) { return CODES_AT + (input % (NIBBLES ? 16 : 32) / 4 * PANEL + lane) * 4 + input % 4; }
};

using FormatI8 = QuantFormat<8, 128, false, true>;
using FormatQ8 = QuantFormat<8, 128, false, false>;
using FormatQ4 = QuantFormat<4, 8, false, false>;
using FormatQ4M = QuantFormat<4, 0, true, false>;

// Call `body` with the format of quantized weights. Dense weights make no call.
template <class F>
inline void with_format(DType dtype, F body) {
    switch (dtype) {
        case DType::I8: return body(FormatI8());
        case DType::Q8: return body(FormatQ8());
        case DType::Q4: return body(FormatQ4());
        case DType::Q4M: return body(FormatQ4M());
        default: return;
    }
}

inline float from_f16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
    uint32_t bits = sign | ((magnitude << 13) + 0x38000000);
    if (magnitude >= 0x7c00) bits = sign | 0x7f800000 | (magnitude << 13);
    float value;
    std::memcpy(&value, &bits, 4);
    if (magnitude < 0x0400) value = (sign != 0 ? -1.0f : 1.0f) * float(magnitude) * 5.9604645e-8f;  // 2^-24
    return value;
}

}  // namespace
}  // namespace baton
