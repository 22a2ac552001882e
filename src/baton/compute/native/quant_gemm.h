// GEMM of quantized activations with quantized panels, for the instruction set of the including file.
#pragma once
#include "panel_prefetcher.h"
#include "quant.h"

namespace baton {
namespace {

// ---- integers: as many lanes of int32 as Vec has floats ----------------------------------------------------------

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
constexpr bool SUMS_OF_16_BITS = false;
#else
constexpr bool SUMS_OF_16_BITS = true;  // for 4-bit weights: add_pairs() is faster than dot()
#endif
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr int DOT_ZERO = 128;  // dot() multiplies numbers with codes - DOT_ZERO
#else
constexpr int DOT_ZERO = 0;
#endif

#if defined(__AVX512F__)
constexpr int QUANT_ROWS_MAX = 6, QUANT_VECTORS = 2;
using Ints = __m512i;
inline Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Ints low_halves(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints high_halves(Ints x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
inline Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Vec load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints dot(Ints sum, Ints codes, Ints numbers) {  // unsigned bytes by signed bytes, four to a lane, exact
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, codes, numbers);
#else
    const Ints even = _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(255)),
                                        _mm512_srai_epi16(_mm512_slli_epi16(numbers, 8), 8));
    const Ints odd = _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), _mm512_srai_epi16(numbers, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
// Add unsigned bytes of 4 bits by signed bytes to lanes of 16 bits, two products to a lane. A group adds at most
// 16 * 15 * 127 to a lane, which 16 bits hold, so the sums are exact.
inline Ints add_pairs(Ints sums, Ints codes, Ints numbers) {
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, numbers));
}
inline Ints add_halves(Ints sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }  // to lanes of 32 bits
inline Ints store_int8(int8_t* p, Vec x) {  // and return what is stored
    const __m512i numbers = _mm512_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(numbers));
    return _mm512_srai_epi32(_mm512_slli_epi32(numbers, 24), 24);
}
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline int32_t reduce_sum(Ints x) { return _mm512_reduce_add_epi32(x); }
#elif defined(__AVX2__)
constexpr int QUANT_ROWS_MAX = 4;
#if defined(__AVXVNNI__)
constexpr int QUANT_VECTORS = 2;
#else
constexpr int QUANT_VECTORS = 4;
#endif
using Ints = __m256i;
inline Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints low_halves(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints high_halves(Ints x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
inline Vec to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Vec load_f16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints dot(Ints sum, Ints codes, Ints numbers) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, numbers);
#else
    // A lane of 16 bits holds two products of at most 128 x 127.
    const Ints weights = _mm256_xor_si256(codes, _mm256_set1_epi8(char(DOT_ZERO)));
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(numbers, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
inline Ints add_pairs(Ints sums, Ints codes, Ints numbers) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, numbers));
}
inline Ints add_halves(Ints sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Ints store_int8(int8_t* p, Vec x) {
    const __m256i numbers = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_cvtps_epi32(x), 24), 24);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
    return numbers;
}
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline int32_t reduce_sum(Ints x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
#elif defined(BATON_NEON)
constexpr int QUANT_ROWS_MAX = 2, QUANT_VECTORS = 4;
using Ints = int32x4_t;
inline Ints ints(int32_t x) { return vdupq_n_s32(x); }
inline Ints load_codes(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
inline Ints low_halves(Ints x) { return vandq_s32(x, vdupq_n_s32(0x0f0f0f0f)); }
inline Ints high_halves(Ints x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
inline Vec to_floats(Ints x) { return vcvtq_f32_s32(x); }
inline Vec load_f16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline Ints dot(Ints sum, Ints codes, Ints numbers) {
    const int8x16_t n = vreinterpretq_s8_s32(numbers);
#if defined(__ARM_FEATURE_DOTPROD)  // of signed bytes: code - 128, and 128 times the numbers
    const int8x16_t c = vreinterpretq_s8_s32(veorq_s32(codes, vdupq_n_s32(int32_t(0x80808080))));
    return vdotq_s32(vaddq_s32(sum, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), n), 7)), c, n);
#else
    const uint8x16_t c = vreinterpretq_u8_s32(codes);
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(c))), n_low = vmovl_s8(vget_low_s8(n));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(c)), n_high = vmovl_high_s8(n);
    const int32x4_t a = vpaddq_s32(vmull_s16(vget_low_s16(low), vget_low_s16(n_low)), vmull_high_s16(low, n_low));
    const int32x4_t b = vpaddq_s32(vmull_s16(vget_low_s16(high), vget_low_s16(n_high)), vmull_high_s16(high, n_high));
    return vaddq_s32(sum, vpaddq_s32(a, b));
#endif
}
inline Ints add_pairs(Ints sums, Ints codes, Ints numbers) { return dot(sums, codes, numbers); }
inline Ints add_halves(Ints sums) { return sums; }
inline Ints store_int8(int8_t* p, Vec x) {  // 0 beyond 8 bits, as elsewhere
    const int32x4_t fits = vreinterpretq_s32_u32(vcaleq_f32(x, broadcast(127.0f)));
    const int32x4_t numbers = vandq_s32(vcvtnq_s32_f32(x), fits);
    const int16x4_t half = vmovn_s32(numbers);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
    std::memcpy(p, &bytes, LANES);
    return numbers;
}
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline int32_t reduce_sum(Ints x) { return vaddvq_s32(x); }
#else
constexpr int QUANT_ROWS_MAX = 1, QUANT_VECTORS = PANEL;
struct Ints {
    uint32_t bits;
};
inline Ints ints(int32_t x) { return {uint32_t(x)}; }
inline Ints load_codes(const uint8_t* p) {
    Ints x;
    std::memcpy(&x.bits, p, 4);
    return x;
}
inline Ints low_halves(Ints x) { return {x.bits & 0x0f0f0f0f}; }
inline Ints high_halves(Ints x) { return {(x.bits >> 4) & 0x0f0f0f0f}; }
inline Vec to_floats(Ints x) { return float(int32_t(x.bits)); }
inline Vec load_f16(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return from_f16(half);
}
inline Ints dot(Ints sum, Ints codes, Ints numbers) {
    int32_t total = int32_t(sum.bits);
    for (int i = 0; i < 32; i += 8) total += int32_t((codes.bits >> i) & 255) * int8_t(numbers.bits >> i);
    return {uint32_t(total)};
}
inline Ints add_pairs(Ints sums, Ints codes, Ints numbers) { return dot(sums, codes, numbers); }
inline Ints add_halves(Ints sums) { return sums; }
inline Ints store_int8(int8_t* p, Vec x) {
    *p = x >= -127.0f && x <= 127.0f ? int8_t(x) : int8_t(0);
    return ints(*p);
}
inline Ints add(Ints a, Ints b) { return {a.bits + b.bits}; }
inline int32_t reduce_sum(Ints x) { return int32_t(x.bits); }
#endif

// ---- activations -------------------------------------------------------------------------------------------------

// Quantize one group of a row to int8, the largest number to 127. Return the scale.
template <class Element>
inline float quantize_group(const Element* in, int8_t* out, int32_t* group_sum) {
    Vec top = zero();
    for (int i = 0; i < QUANT_GROUP; i += LANES) {
        const Vec x = load(in + i);
        top = maximum(top, maximum(x, sub(zero(), x)));
    }
    const float most = reduce_max(top), scale = most / 127.0f;
    const Vec factor = broadcast(most > 0.0f ? 127.0f / most : 0.0f);
    Ints total = ints(0);  // not from memory: a wide load waits for the narrow stores before it
    for (int i = 0; i < QUANT_GROUP; i += LANES)
        total = add(total, store_int8(out + i, nearest(mul(load(in + i), factor))));
    *group_sum = reduce_sum(total);
    return scale;
}

// Quantize rows [first, first + count) of `in` (type `dtype`, [inputs] each) to QuantRows.
void quantize_rows(Rows in, DType dtype, int inputs, int first, int count, void* out) {
    for (int row = first; row < first + count; row++) {
        int8_t* numbers = static_cast<int8_t*>(out) + row * QuantRow::bytes(inputs);
        float* scales = reinterpret_cast<float*>(numbers + inputs);
        int32_t* sums = reinterpret_cast<int32_t*>(scales + inputs / QUANT_GROUP);
        float* scaled_sums = reinterpret_cast<float*>(sums + inputs / QUANT_GROUP);
        for (int group = 0; group < inputs / QUANT_GROUP; group++) {
            const int64_t at = row * in.stride + group * QUANT_GROUP;
            scales[group] = dtype == DType::BF16 ? quantize_group(static_cast<const bf16*>(in.data) + at,
                                                                  numbers + group * QUANT_GROUP, sums + group)
                                                 : quantize_group(static_cast<const float*>(in.data) + at,
                                                                  numbers + group * QUANT_GROUP, sums + group);
            scaled_sums[group] = scales[group] * float(sums[group]);
        }
    }
}

// ---- products ----------------------------------------------------------------------------------------------------

// dots[ROWS][QUANT_VECTORS] = the exact products of one group of inputs: numbers x (codes - ZERO).
template <class Format, int ROWS>
inline void multiply_group(const int8_t* numbers, const int32_t* number_sums, int64_t stride, const uint8_t* codes,
                           Ints (&dots)[ROWS][QUANT_VECTORS]) {
    constexpr bool NARROW = Format::NIBBLES && SUMS_OF_16_BITS;
    constexpr int ZERO = Format::ZERO - (NARROW ? 0 : DOT_ZERO);
    const auto offset = [&](int r) {
        if (ZERO == 0) return ints(0);
        return ints(-ZERO * load_word(reinterpret_cast<const char*>(number_sums) + r * stride));
    };
    const auto multiply_quad = [&](const Ints(&weights)[QUANT_VECTORS], const int8_t* four) {
        for (int r = 0; r < ROWS; r++) {
            const Ints x = ints(load_word(four + r * stride));
            for (int v = 0; v < QUANT_VECTORS; v++)
                dots[r][v] = NARROW ? add_pairs(dots[r][v], weights[v], x) : dot(dots[r][v], weights[v], x);
        }
    };
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < QUANT_VECTORS; v++) dots[r][v] = NARROW ? ints(0) : offset(r);
    for (int quad = 0; quad < (Format::NIBBLES ? QUADS / 2 : QUADS); quad++) {
        Ints weights[QUANT_VECTORS], halves[QUANT_VECTORS];
        for (int v = 0; v < QUANT_VECTORS; v++) {
            weights[v] = load_codes(codes + quad * PANEL * 4 + v * LANES * 4);
            halves[v] = Format::NIBBLES ? low_halves(weights[v]) : weights[v];
        }
        multiply_quad(halves, numbers + quad * 4);
        if (!Format::NIBBLES) continue;
        for (int v = 0; v < QUANT_VECTORS; v++) halves[v] = high_halves(weights[v]);
        multiply_quad(halves, numbers + QUANT_GROUP / 2 + quad * 4);
    }
    if (!NARROW) return;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < QUANT_VECTORS; v++) dots[r][v] = add(add_halves(dots[r][v]), offset(r));
}

// c[ROWS][32] = rows x panel
template <class Format, int ROWS, class Prefetcher>
void multiply_quant_rows(const void* rows, int first, const uint8_t* panel, int inputs, float* c,
                         Prefetcher& prefetcher) {
    const QuantRow base(rows, inputs, first);
    const int64_t stride = QuantRow::bytes(inputs);
    for (int column = 0; column < PANEL; column += QUANT_VECTORS * LANES) {
        Vec sums[ROWS][QUANT_VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < QUANT_VECTORS; v++) sums[r][v] = zero();
        const uint8_t* at = panel;
        for (int group = 0; group < inputs / QUANT_GROUP; group++, at += Format::GROUP_BYTES) {
            Ints dots[ROWS][QUANT_VECTORS];
            prefetcher.prefetch_lines();
            multiply_group<Format>(base.numbers + group * QUANT_GROUP, base.sums + group, stride,
                                   at + Format::CODES_AT + column * 4, dots);
            for (int v = 0; v < QUANT_VECTORS; v++) {
                const int64_t half = (column + v * LANES) * 2;
                const Vec scale = Format::CHANNEL ? broadcast(1.0f) : load_f16(at + half);
                const Vec minimum = Format::MINIMUM ? load_f16(at + Format::SCALES_BYTES + half) : zero();
                for (int r = 0; r < ROWS; r++) {
                    float row_scale, scaled_sum;
                    std::memcpy(&row_scale, reinterpret_cast<const char*>(base.scales + group) + r * stride, 4);
                    const Vec product = mul(to_floats(dots[r][v]), broadcast(row_scale));
                    sums[r][v] = Format::CHANNEL ? add(product, sums[r][v]) : fma(product, scale, sums[r][v]);
                    if (!Format::MINIMUM) continue;
                    std::memcpy(&scaled_sum, reinterpret_cast<const char*>(base.scaled_sums + group) + r * stride, 4);
                    sums[r][v] = fma(minimum, broadcast(scaled_sum), sums[r][v]);
                }
            }
        }
        for (int v = 0; v < QUANT_VECTORS; v++) {
            const int lane = column + v * LANES;
            for (int r = 0; r < ROWS; r++) {
                if (Format::CHANNEL)
                    sums[r][v] = mul(sums[r][v], load(reinterpret_cast<const float*>(at) + lane));
                store(c + r * PANEL + lane, sums[r][v]);
            }
        }
    }
}

// The same for 1 .. QUANT_ROWS_MAX rows.
template <class Format, int ROWS = QUANT_ROWS_MAX, class Prefetcher>
inline void multiply_quant(int count, const void* rows, int first, const uint8_t* panel, int inputs, float* c,
                           Prefetcher& prefetcher) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) return multiply_quant<Format, ROWS - 1>(count, rows, first, panel, inputs, c, prefetcher);
    }
    multiply_quant_rows<Format, ROWS>(rows, first, panel, inputs, c, prefetcher);
}

// Multiply rows with a panel, tile by tile: finish(c, first row, rows).
template <class Format, class F, class Prefetcher>
inline void multiply_quant_panel(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish,
                                 Prefetcher prefetcher) {
    alignas(64) float c[QUANT_ROWS_MAX * PANEL];
    const int64_t panel_bytes = Format::panel_bytes(w.inputs), count = item.count;
    const uint8_t *panels = static_cast<const uint8_t*>(w.panels), *weights = panels + item.panel * panel_bytes;
    const int tiles = tile_count(item.count, QUANT_ROWS_MAX);
    for (int tile = 0; tile < tiles; tile++) {
        const int offset = int(count * tile / tiles), rows = int(count * (tile + 1) / tiles) - offset;
        out.prefetch(item.first + offset, rows);
        multiply_quant<Format>(rows, a.data, item.first + offset, weights, w.inputs, c, prefetcher);
        if (w.bias != nullptr)
            for (int i = 0; i < rows * PANEL; i += LANES)
                store(c + i, add(load(c + i), load(w.bias + item.panel * PANEL + i % PANEL)));
        finish(c, item.first + offset, rows);
    }
}

template <class Format, class F>
inline void multiply_quant_panel(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish) {
    if (!PanelPrefetcher::pays(item, Format::NIBBLES))
        return multiply_quant_panel<Format>(w, a, item, out, finish, NoPrefetcher());
    const int passes = PANEL / (QUANT_VECTORS * LANES) * tile_count(item.count, QUANT_ROWS_MAX);
    const PanelPrefetcher prefetcher(static_cast<const uint8_t*>(w.panels), Format::panel_bytes(w.inputs), item,
                                     w.inputs / QUANT_GROUP, passes);
    multiply_quant_panel<Format>(w, a, item, out, finish, prefetcher);
}

// Dequantize one output's weights.
template <class Format>
inline void unpack_quant_row(const Linear& w, int output, float* out, int count) {
    const int lane = output % PANEL;
    const uint8_t* at = static_cast<const uint8_t*>(w.panels) + int64_t{output / PANEL} * Format::panel_bytes(w.inputs);
    const uint8_t* channel = at + int64_t{w.inputs / QUANT_GROUP} * Format::GROUP_BYTES + lane * 4;
    const auto half = [](const uint8_t* p) {
        uint16_t bits;
        std::memcpy(&bits, p, 2);
        return from_f16(bits);
    };
    for (int k = 0; k < count; k++) {
        const uint8_t* group = at + int64_t{k / QUANT_GROUP} * Format::GROUP_BYTES;
        const int input = k % QUANT_GROUP, stored = group[Format::code_at(lane, input)];
        const int code = !Format::NIBBLES ? stored : input < 16 ? stored & 15 : stored >> 4;
        float scale;
        if (Format::CHANNEL) std::memcpy(&scale, channel, 4);
        else scale = half(group + lane * 2);
        const float minimum = Format::MINIMUM ? half(group + Format::SCALES_BYTES + lane * 2) : 0.0f;
        out[k] = scale * float(code - Format::ZERO) + minimum;
    }
}

}  // namespace
}  // namespace baton
