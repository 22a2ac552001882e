// Conversion of one head's keys or values of one token to and from the type of the arena. With int8 and e4m3, a float32
// scale follows the numbers. It depends on this token only, so that chunks and batches change no bit.
// Source: e4m3 of arXiv 2209.05433, section 3, without NaN. The largest number of a head becomes 448.
#pragma once
#include "quant_gemm.h"

namespace baton {
namespace {

constexpr float E4M3_LARGEST = 448.0f;

inline Vec load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return float(*p);
#endif
}

inline uint8_t to_e4m3(float value) {  // |value| <= 448; nearest, ties to even
    const float size = std::fabs(value);
    const uint8_t sign = value < 0.0f ? 0x80 : 0;
    if (!(size >= 0.015625f)) return uint8_t(sign | (size > 0.0f ? int(std::nearbyintf(size * 512.0f)) : 0));
    uint32_t bits;
    std::memcpy(&bits, &size, 4);
    const uint32_t code = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}

// e4m3 is the upper part of a float16, with an exponent bias that differs by 8.
inline uint16_t f16_of_e4m3(uint8_t code) { return uint16_t((code & 0x7f) << 7 | (code & 0x80) << 8); }

inline float max_abs(const float* row, int count) {
    float most = 0.0f;
    for (int i = 0; i < count; i++) most = std::fabs(row[i]) > most ? std::fabs(row[i]) : most;
    return most;
}

// Round one head [dim] to 8 bits, followed by its scale.
inline void store_kv_head(DType dtype, uint8_t* out, const float* row, int dim) {
    const float limit = dtype == DType::KV_I8 ? 127.0f : E4M3_LARGEST, most = max_abs(row, dim);
    const float factor = most > 0.0f && most < 1e38f ? limit / most : 0.0f, scale = most < 1e38f ? most / limit : 0.0f;
    for (int i = 0; i < dim; i++) {
        const float value = row[i] * factor;
        const bool fits = std::fabs(value) <= limit;  // rounding may exceed it, and NaN compares false
        const float kept = fits ? value : value > 0.0f ? limit : value < 0.0f ? -limit : 0.0f;
        out[i] = dtype == DType::KV_I8 ? uint8_t(int8_t(std::nearbyintf(kept))) : to_e4m3(kept);
    }
    std::memcpy(out + dim, &scale, 4);
}

// Read one head [dim] as floats.
inline void load_kv_head(DType dtype, const void* in, float* row, int dim) {
    if (dtype == DType::F32) return void(std::memcpy(row, in, size_t(dim) * 4));
    if (dtype == DType::BF16) {
        for (int i = 0; i < dim; i++) row[i] = from_bf16(static_cast<const bf16*>(in)[i]);
        return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(in);
    float scale;
    std::memcpy(&scale, codes + dim, 4);
    int i = 0;
    if (dtype == DType::KV_I8) {
        const int8_t* numbers = reinterpret_cast<const int8_t*>(codes);
        for (; i + LANES <= dim; i += LANES) store(row + i, mul(load_int8(numbers + i), broadcast(scale)));
        for (; i < dim; i++) row[i] = float(numbers[i]) * scale;
        return;
    }
    scale *= 256.0f;
    alignas(64) uint16_t halves[LANES];
    for (; i + LANES <= dim; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) halves[lane] = f16_of_e4m3(codes[i + lane]);
        store(row + i, mul(load_f16(reinterpret_cast<const uint8_t*>(halves)), broadcast(scale)));
    }
    for (; i < dim; i++) row[i] = from_f16(f16_of_e4m3(codes[i])) * scale;
}

}  // namespace
}  // namespace baton
