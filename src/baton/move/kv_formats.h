// KV numbers of one head of one token (a cell) in every format of an arena, a tier or the wire. The loops are plain, so
// that the compiler vectorizes them for each instruction set. `number_formats.py` gives the same bits.
// Sources: e4m3 of arXiv 2209.05433, section 3, without NaN; e2m1 and e8m0 of the OCP Microscaling Formats 1.0.
#pragma once
#include <cstdint>
#include <cstring>

namespace baton {
namespace {

enum class KVFormat : int32_t { F32 = 0, BF16 = 1, I8 = 6, E4M3 = 7, FP4 = 8, MXFP4 = 9, F16 = 10 };

constexpr int MXFP4_GROUP = 32;  // numbers with a common power of two
constexpr int FP4_GROUP = 16;    // numbers with a common e4m3 scale; a power of two scales the whole cell
constexpr float E4M3_MOST = 448.0f, TOO_LARGE = 1e38f, TOO_SMALL = 1e-30f;

constexpr int64_t cell_bytes(KVFormat format, int dim) {
    switch (format) {
        case KVFormat::F32: return dim * 4;
        case KVFormat::BF16:
        case KVFormat::F16: return dim * 2;
        case KVFormat::FP4: return dim / 2 + dim / FP4_GROUP + 1;
        case KVFormat::MXFP4: return dim / 2 + dim / MXFP4_GROUP;
        default: return dim + 4;
    }
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Round to the nearest integer, ties to even, for |value| < 2^22.
inline float round_even(float value) { return (value + 12582912.0f) - 12582912.0f; }

inline float power_of_two(int exponent) { return float_of(exponent < -126 ? 0x00400000u : uint32_t(exponent + 127) << 23); }

inline float largest_of(const float* row, int count) {  // of the absolute values; NaN does not count
    int32_t most = 0;
    for (int i = 0; i < count; i++) {
        const int32_t size = int32_t(bits_of(row[i]) & 0x7fffffff);
        const int32_t counted = size > 0x7f800000 ? 0 : size;
        most = counted > most ? counted : most;
    }
    return float_of(uint32_t(most));
}

// The number scaled by `factor`, at most `limit`. NaN becomes 0.
inline float fitted(float number, float factor, float limit) {
    const float value = number * factor;
    const float low = value > limit ? limit : value < -limit ? -limit : value;
    return value != value ? 0.0f : low;
}

inline uint8_t e4m3_of(float value) {  // |value| <= 448; nearest, ties to even
    const uint32_t size = bits_of(value) & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120u << 3);
    const uint32_t small = uint32_t(int32_t(round_even(float_of(size < 0x3c800000 ? size : 0) * 512.0f)));
    const uint32_t code = size < 0x3c800000 ? small : normal;
    return uint8_t((value < 0.0f ? 0x80u : 0u) | (code > 0x7e ? 0x7eu : code));
}

inline float of_e4m3(uint8_t code) {
    const uint32_t size = code & 0x7f;
    const float value = size < 8 ? float(size) * 0.001953125f : float_of((size << 20) + (120u << 23));
    return code & 0x80 ? -value : value;
}

// Vectors of 16 numbers: the compiler splits them where registers are smaller.
typedef float Floats16 __attribute__((vector_size(64)));
typedef int32_t Ints16 __attribute__((vector_size(64)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));
#define BATON_INLINE inline __attribute__((always_inline))

template <class Vector>
BATON_INLINE Vector vector_at(const void* memory) {
    Vector vector;
    std::memcpy(&vector, memory, sizeof vector);
    return vector;
}

BATON_INLINE Ints16 larger_of(Ints16 a, Ints16 b) { return a > b ? a : b; }

BATON_INLINE Ints16 sizes_of(const float* row) {  // the bits of the absolute values; 0 for NaN
    const Ints16 size = vector_at<Ints16>(row) & 0x7fffffff;
    return size > 0x7f800000 ? size ^ size : size;
}

BATON_INLINE float largest_of(Ints16 sizes) {
    sizes = larger_of(sizes, __builtin_shuffle(sizes, Ints16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    sizes = larger_of(sizes, __builtin_shuffle(sizes, Ints16{4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3}));
    sizes = larger_of(sizes, __builtin_shuffle(sizes, Ints16{2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1}));
    return float_of(uint32_t(sizes[0] > sizes[1] ? sizes[0] : sizes[1]));
}

// Round 16 numbers, times `factor`, to e2m1: to nearest, ties to even, at most 6, and no negative zero.
BATON_INLINE Bytes16 e2m1_of(const float* row, float factor) {
    const Floats16 value = vector_at<Floats16>(row) * factor;
    const Ints16 bits = vector_at<Ints16>(&value), wide = bits & 0x7fffffff;
    const Ints16 whole = wide > 0x7f800000 ? wide ^ wide : wide;  // NaN becomes 0
    const Floats16 size = vector_at<Floats16>(&whole);
    const Ints16 minus = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                         (size >= 3.5f) + (size > 5.0f);
    return __builtin_convertvector((bits < 0) & (minus < 0) ? 8 - minus : -minus, Bytes16);
}

BATON_INLINE void load_e2m1(Bytes16 codes, float* row, float scale) {
    const Bytes16 halves = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const Bytes16 found = __builtin_shuffle(halves, codes);
    const Floats16 numbers = __builtin_convertvector(__builtin_convertvector(found, Ints16), Floats16) * (scale * 0.5f);
    std::memcpy(row, &numbers, sizeof numbers);
}

constexpr Bytes16 UPPER_HALF = {8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr Bytes16 TWICE_LOWER = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr Bytes16 LOW_THEN_HIGH = {0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31};

// Byte i of a group holds number i in its lower half, and number i + GROUP / 2 in its upper half.

// The scale is chosen so that the largest number rounds to 4 or 6.
BATON_INLINE void store_mxfp4(uint8_t* out, const float* row, int dim) {
    for (int at = 0; at < dim; at += MXFP4_GROUP) {
        const float *low = row + at, *high = low + 16, most = largest_of(larger_of(sizes_of(low), sizes_of(high)));
        const int found = int((bits_of(most) + 0x200000) >> 23) - 129, exponent = found < -127 ? -127 : found;
        const bool fits = most > 0.0f && most < TOO_LARGE;
        const float factor = fits ? power_of_two(-exponent) : 0.0f;
        const Bytes16 codes = e2m1_of(low, factor) | e2m1_of(high, factor) << 4;
        std::memcpy(out + at / 2, &codes, sizeof codes);
        out[dim / 2 + at / MXFP4_GROUP] = fits ? uint8_t(exponent + 127) : 0;
    }
}

BATON_INLINE void load_mxfp4(const uint8_t* in, float* row, int dim) {
    for (int at = 0; at < dim; at += MXFP4_GROUP) {
        const uint8_t code = in[dim / 2 + at / MXFP4_GROUP];
        const float scale = code == 255 ? float_of(0x7fc00000) : power_of_two(code - 127);
        const Bytes16 codes = vector_at<Bytes16>(in + at / 2);
        load_e2m1(codes & 15, row + at, scale);
        load_e2m1(codes >> 4 & 15, row + at + 16, scale);
    }
}

// The largest e4m3 scale of a cell lies between 240 and 448, also after it was rounded.
BATON_INLINE void store_fp4(uint8_t* out, const float* row, int dim) {
    Ints16 sizes = sizes_of(row);
    for (int at = FP4_GROUP; at < dim; at += FP4_GROUP) sizes = larger_of(sizes, sizes_of(row + at));
    const float most = largest_of(sizes);
    uint8_t *scales = out + dim / 2, *last = scales + dim / FP4_GROUP;
    if (!(most > TOO_SMALL && most < TOO_LARGE)) {
        std::memset(out, 0, size_t(cell_bytes(KVFormat::FP4, dim)));
        return;
    }
    const int exponent = int((bits_of(most) + (0x7fffff - 0x2e0000)) >> 23) - 138;  // most <= 6 * 464 * 2^exponent
    const float factor = power_of_two(-exponent);
    for (int at = 0; at < dim; at += FP4_GROUP) {
        const float wanted = largest_of(sizes_of(row + at)) * factor / 6.0f;
        const uint8_t code = e4m3_of(wanted > E4M3_MOST ? E4M3_MOST : wanted);
        const Bytes16 codes = e2m1_of(row + at, code == 0 ? 0.0f : factor / of_e4m3(code));
        const Bytes16 joined = codes | __builtin_shuffle(codes, UPPER_HALF) << 4;
        std::memcpy(out + at / 2, &joined, 8);
        scales[at / FP4_GROUP] = code;
    }
    *last = uint8_t(exponent + 127);
}

BATON_INLINE void load_fp4(const uint8_t* in, float* row, int dim) {
    const uint8_t *scales = in + dim / 2, code = scales[dim / FP4_GROUP];
    const float whole = code == 255 ? float_of(0x7fc00000) : power_of_two(code - 127);
    for (int at = 0; at < dim; at += FP4_GROUP) {
        Bytes16 codes = {};
        std::memcpy(&codes, in + at / 2, 8);
        const Bytes16 twice = __builtin_shuffle(codes, TWICE_LOWER), low = codes & 15, high = twice >> 4 & 15;
        load_e2m1(__builtin_shuffle(low, high, LOW_THEN_HIGH), row + at, of_e4m3(scales[at / FP4_GROUP]) * whole);
    }
}

// 8 bits, followed by a float32 scale that makes the largest number the largest code.
template <bool IS_INT8>
inline void store_8_bits(uint8_t* out, const float* row, int dim) {
    const float limit = IS_INT8 ? 127.0f : E4M3_MOST, most = largest_of(row, dim);
    const float factor = most > 0.0f && most < TOO_LARGE ? limit / most : 0.0f;
    const float scale = most < TOO_LARGE ? most / limit : 0.0f;
    for (int i = 0; i < dim; i++) {
        const float value = fitted(row[i], factor, limit);
        out[i] = IS_INT8 ? uint8_t(int8_t(int32_t(round_even(value)))) : e4m3_of(value);
    }
    std::memcpy(out + dim, &scale, 4);
}

}  // namespace
}  // namespace baton
