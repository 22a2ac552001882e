// One vector of floats of the instruction set of the including file. LANES is 16, 8, 4 or 1.
// All code is in an unnamed namespace, because each translation unit compiles it with other flags.
// Sums use fma() explicitly, and the compiler contracts no other operation, so every use gives the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(BATON_NEON)
#include <arm_neon.h>
#endif

#include "types.h"

namespace baton {
namespace {

inline float from_bf16(bf16 x) {
    const uint32_t bits = uint32_t{x} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline bf16 to_bf16(float value) {  // nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float reduce_sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
// Reduce 16 vectors at once: lane i has the result of x[i]. Each is combined in the order of reduce_sum().
template <class Op>
inline Vec reduce_each(const Vec (&x)[16], Op op) {
    Vec a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = op(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
    for (int i = 0; i < 4; i++)
        b[i] = op(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; i++)
        c[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2]))),
                  _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2]))));
    const Vec last = op(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, last);
}
inline Vec load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec zero_below(Vec x, Vec of, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(of, broadcast(limit), _CMP_NLT_UQ), x);
}
// Keep lanes [from, to), set the others to `other`.
inline Vec keep_lanes(Vec x, int from, int to, float other) {
    const uint32_t below_to = to >= LANES ? 0xffff : to <= 0 ? 0 : (1u << to) - 1;
    const uint32_t below_from = from >= LANES ? 0xffff : from <= 0 ? 0 : (1u << from) - 1;
    return _mm512_mask_mov_ps(broadcast(other), __mmask16(below_to & ~below_from), x);
}
// LANES words of 4 bytes: a float32 or two bfloat16 each.
using Words = __m512i;
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
inline Words broadcast_word(int32_t word) { return _mm512_set1_epi32(word); }
inline Vec as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Vec first_bf16(Words x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline Vec second_bf16(Words x) { return as_floats(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000)))); }

#elif defined(__AVX2__)

constexpr int LANES = 8;
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float reduce_sum(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float reduce_max(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline Vec load(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline void store(bf16* p, Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec x, Vec n) {  // x from 1/2 to 2, n in -126 .. 127
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}
inline Vec zero_below(Vec x, Vec of, float limit) {
    return _mm256_and_ps(x, _mm256_cmp_ps(of, broadcast(limit), _CMP_NLT_UQ));
}
inline Vec keep_lanes(Vec x, int from, int to, float other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane);
    const __m256i within = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_blendv_ps(broadcast(other), x, _mm256_castsi256_ps(within));
}
using Words = __m256i;
inline Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_words(void* p, Words x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline Words broadcast_word(int32_t word) { return _mm256_set1_epi32(word); }
inline Vec as_floats(Words x) { return _mm256_castsi256_ps(x); }
inline Vec first_bf16(Words x) { return as_floats(_mm256_slli_epi32(x, 16)); }
inline Vec second_bf16(Words x) { return as_floats(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000)))); }

#elif defined(BATON_NEON)

constexpr int LANES = 4;
using Vec = float32x4_t;
inline Vec zero() { return vdupq_n_f32(0.0f); }
inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec x) { vst1q_f32(p, x); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec maximum(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec minimum(Vec a, Vec b) { return vminq_f32(a, b); }
inline float reduce_sum(Vec a) { return vaddvq_f32(a); }
inline float reduce_max(Vec a) { return vmaxvq_f32(a); }
inline Vec load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void store(bf16* p, Vec x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}
inline Vec nearest(Vec x) { return vrndnq_f32(x); }
inline Vec scale_by_power(Vec x, Vec n) {  // x from 1/2 to 2, n in -126 .. 127
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtnq_s32_f32(n), 23)));
}
inline Vec zero_below(Vec x, Vec of, float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(of, broadcast(limit))));
}
inline Vec keep_lanes(Vec x, int from, int to, float other) {
    alignas(16) static constexpr int32_t order[LANES] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(order);
    const uint32x4_t within = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
    return vbslq_f32(within, x, broadcast(other));
}
using Words = uint32x4_t;
inline Words load_words(const void* p) { return vld1q_u32(static_cast<const uint32_t*>(p)); }
inline void store_words(void* p, Words x) { vst1q_u32(static_cast<uint32_t*>(p), x); }
inline Words broadcast_word(int32_t word) { return vdupq_n_u32(uint32_t(word)); }
inline Vec as_floats(Words x) { return vreinterpretq_f32_u32(x); }
inline Vec first_bf16(Words x) { return as_floats(vshlq_n_u32(x, 16)); }
inline Vec second_bf16(Words x) { return as_floats(vandq_u32(x, vdupq_n_u32(0xffff0000))); }

#else

constexpr int LANES = 1;
using Vec = float;
inline Vec zero() { return 0.0f; }
inline Vec broadcast(float x) { return x; }
inline Vec load(const float* p) { return *p; }
inline void store(float* p, Vec x) { *p = x; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
inline float reduce_sum(Vec a) { return a; }
inline float reduce_max(Vec a) { return a; }
inline Vec load(const bf16* p) { return from_bf16(*p); }
inline void store(bf16* p, Vec x) { *p = to_bf16(x); }
inline Vec nearest(Vec x) { return std::nearbyintf(x); }
inline Vec scale_by_power(Vec x, Vec n) { return n >= -200.0f ? std::ldexp(x, int(n)) : x; }
inline Vec zero_below(Vec x, Vec of, float limit) { return of < limit ? 0.0f : x; }
inline Vec keep_lanes(Vec x, int from, int to, float other) { return from <= 0 && to > 0 ? x : other; }
using Words = uint32_t;
inline Words load_words(const void* p) {
    Words word;
    std::memcpy(&word, p, 4);
    return word;
}
inline void store_words(void* p, Words x) { std::memcpy(p, &x, 4); }
inline Words broadcast_word(int32_t word) { return Words(word); }
inline Vec first_bf16(Words x) { return from_bf16(bf16(x)); }
inline Vec second_bf16(Words x) { return from_bf16(bf16(x >> 16)); }

#endif

inline int32_t load_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

// sum += a[0] * (first numbers of b's pairs) + a[1] * (second ones), products exact.
inline Vec add_pair_products(const bf16* a, Words b, Vec sum) {
    const Words pair = broadcast_word(load_word(a));
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)pair, (__m512bh)b);
#else
    return fma(second_bf16(pair), second_bf16(b), fma(first_bf16(pair), first_bf16(b), sum));
#endif
}

// 2 to the x for x from -126 to 127, within two units of the last place; exactly 1 at 0. NaN stays NaN.
inline Vec power_of_two_in_range(Vec x) {
    const Vec power = nearest(x), rest = sub(x, power);
    Vec value = broadcast(1.3264727e-3f);  // minimax from -1/2 to 1/2; the last coefficient is exactly 1
    value = fma(value, rest, broadcast(9.671513e-3f));
    value = fma(value, rest, broadcast(5.5507336e-2f));
    value = fma(value, rest, broadcast(0.24022242f));
    value = fma(value, rest, broadcast(0.693147f));
    value = fma(value, rest, broadcast(1.0f));
    return scale_by_power(value, power);
}

// The same for any x up to 1; exactly 0 below -125.
inline Vec power_of_two(Vec x) { return zero_below(power_of_two_in_range(x), x, -125.0f); }

// x / (1 + e to the -x), as x times a factor, so that NaN stays NaN.
inline Vec silu(Vec x) {
    const Vec power = minimum(broadcast(126.0f), maximum(broadcast(-126.0f), mul(x, broadcast(-1.44269504f))));
    return div(x, add(broadcast(1.0f), power_of_two_in_range(power)));
}

inline float power_of_two_of(float x) {
    float lanes[LANES];
    store(lanes, power_of_two(broadcast(x)));
    return lanes[0];
}

struct Sum {
    Vec operator()(Vec a, Vec b) const { return add(a, b); }
    static float reduce(Vec x) { return reduce_sum(x); }
};
struct Maximum {
    Vec operator()(Vec a, Vec b) const { return maximum(a, b); }
    static float reduce(Vec x) { return reduce_max(x); }
};

// Reduce the first `count` vectors: lane i has the result of x[i].
template <class Op>
inline Vec reduce_rows(const Vec (&x)[LANES], int count, [[maybe_unused]] Op op) {
#if defined(__AVX512F__)
    if (count > LANES / 4) return reduce_each(x, op);
#endif
    float lanes[LANES] = {};
    for (int i = 0; i < count; i++) lanes[i] = Op::reduce(x[i]);
    return load(lanes);
}

}  // namespace
}  // namespace baton
