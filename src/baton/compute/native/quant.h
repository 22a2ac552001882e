// Weights of 4 and 8 bits, computed in stored form with rows of activations rounded to 8 bits.
// A run is 32 inputs with a common scale. Products of a run are summed exactly in integers; runs are added in order as
// floats. Every row has its own scales, so that a row's result does not depend on the other rows.
// Source: the formats Q8_0, Q4_0 and Q4_1 of ggml (ggml-common.h). The layout in panels is our own.
#pragma once
#include "simd.h"

namespace baton {
namespace {

constexpr int RUN = 32;       // inputs with a common scale
constexpr int QUADS = RUN / 4;  // groups of 4 inputs, one dot instruction each

// A row of activations: [inputs] int8, then for each run its scale, the sum of its numbers, and the product of both.
struct QuantRow {
    const int8_t* numbers;
    const float* scales;
    const int32_t* sums;
    const float* scaled_sums;

    static int64_t bytes(int inputs) { return padded(inputs + inputs / RUN * 12, 64); }
    QuantRow(const void* rows, int inputs, int64_t row) {
        numbers = static_cast<const int8_t*>(rows) + row * bytes(inputs);
        scales = reinterpret_cast<const float*>(numbers + inputs);
        sums = reinterpret_cast<const int32_t*>(scales + inputs / RUN);
        scaled_sums = reinterpret_cast<const float*>(sums + inputs / RUN);
    }
};

// The layout of a panel of weights. Per run: [32] float16 scales, [32] float16 minimums if the format has them, then
// 8 bits: [input / 4][32][4]; 4 bits: [input / 4 of the first 16][32][4], inputs 16 .. 31 in the upper halves.
// A weight is scale * (code - ZERO) + minimum. Per-channel weights have float32 scales [32] at the end, none per run.
template <int BITS, int ZERO_CODE, bool WITH_MINIMUM, bool PER_CHANNEL>
struct QuantFormat {
    static constexpr int ZERO = ZERO_CODE;
    static constexpr bool NIBBLES = BITS == 4, MINIMUM = WITH_MINIMUM, CHANNEL = PER_CHANNEL;
    static constexpr int SCALES_BYTES = PER_CHANNEL ? 0 : PANEL * 2;
    static constexpr int CODES_AT = SCALES_BYTES + (WITH_MINIMUM ? PANEL * 2 : 0);
    static constexpr int RUN_BYTES = CODES_AT + PANEL * RUN * BITS / 8;

    static int64_t panel_bytes(int inputs) { return int64_t{inputs / RUN} * RUN_BYTES + (PER_CHANNEL ? PANEL * 4 : 0); }
    // The place of the code of an input of a run, for one output of the panel.
    static int code_at(int lane, int input) { return CODES_AT + (input % (NIBBLES ? 16 : 32) / 4 * PANEL + lane) * 4 + input % 4; }
};

using FormatI8 = QuantFormat<8, 128, false, true>;
using FormatQ8 = QuantFormat<8, 128, false, false>;
using FormatQ4 = QuantFormat<4, 8, false, false>;
using FormatQ4M = QuantFormat<4, 0, true, false>;

// Call `body` with the format of quantized weights. Dense weights make no call.
template <class F>
inline void with_format(Number number, F body) {
    switch (number) {
        case Number::I8: return body(FormatI8());
        case Number::Q8: return body(FormatQ8());
        case Number::Q4: return body(FormatQ4());
        case Number::Q4M: return body(FormatQ4M());
        default: return;
    }
}

inline float from_half(uint16_t half) {
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
