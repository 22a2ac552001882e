// Conversion of one head's keys or values of one token to and from the type of the arena. With 8 and 4 bits, scales
// follow the numbers. They depend on this token only, so that chunks and batches change no bit.
#pragma once
#include "quant_gemm.h"

namespace baton {
namespace {

inline Vec load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(BATON_NEON)
    int8x8_t four = vdup_n_s8(0);
    std::memcpy(&four, p, LANES);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))));
#else
    return float(*p);
#endif
}

// e4m3 is the upper part of a float16, with an exponent bias that differs by 8.
inline uint16_t f16_of_e4m3(uint8_t code) { return uint16_t((code & 0x7f) << 7 | (code & 0x80) << 8); }

// Round one head [dim] to 8 or 4 bits, with its scales.
inline void store_kv_head(DType dtype, uint8_t* out, const float* row, int dim) {
    switch (dtype) {
        case DType::KV_I8: return store_8_bits<true>(out, row, dim);
        case DType::KV_E4M3: return store_8_bits<false>(out, row, dim);
        case DType::KV_FP4: return store_fp4(out, row, dim);
        default: return store_mxfp4(out, row, dim);
    }
}

// Read one head [dim] as floats.
inline void load_kv_head(DType dtype, const void* in, float* row, int dim) {
    if (dtype == DType::F32) return void(std::memcpy(row, in, size_t(dim) * 4));
    if (dtype == DType::BF16) {
        for (int i = 0; i < dim; i++) row[i] = from_bf16(static_cast<const bf16*>(in)[i]);
        return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(in);
    if (dtype == DType::KV_FP4) return load_fp4(codes, row, dim);
    if (dtype == DType::KV_MXFP4) return load_mxfp4(codes, row, dim);
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
