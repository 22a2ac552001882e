// Pack the keys and values of a tile for a GEMM: keys transposed, values in pairs.
#pragma once
#include "simd.h"

namespace baton {
namespace {

// out[i][r] = word `at + i` of rows[r], for LANES words of LANES rows.
#if defined(__AVX512F__)
__attribute__((always_inline)) inline void transpose(const void* const* rows, int64_t at, Words (&out)[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(static_cast<const uint32_t*>(rows[i]) + at);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

#elif defined(__AVX2__)
__attribute__((always_inline)) inline void transpose(const void* const* rows, int64_t at, Words (&out)[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load_words(static_cast<const uint32_t*>(rows[i]) + at);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    }
}
#elif defined(BATON_NEON)
inline void transpose(const void* const* rows, int64_t at, Words (&out)[4]) {
    Words a[4];
    for (int i = 0; i < 4; i++) a[i] = load_words(static_cast<const uint32_t*>(rows[i]) + at);
    const uint32x4x2_t upper = vzipq_u32(a[0], a[2]), lower = vzipq_u32(a[1], a[3]);
    const uint32x4x2_t first = vzipq_u32(upper.val[0], lower.val[0]), last = vzipq_u32(upper.val[1], lower.val[1]);
    out[0] = first.val[0], out[1] = first.val[1], out[2] = last.val[0], out[3] = last.val[1];
}
#else
inline void transpose(const void* const* rows, int64_t at, Words (&out)[1]) {
    out[0] = load_words(static_cast<const uint32_t*>(rows[0]) + at);
}
#endif

// Keys of TILE_KEYS rows as panels of 32 keys. `words`: 4-byte units of a padded row (one float32, two bfloat16).
inline void pack_keys(const void* const* rows, int words, int keys, uint32_t* out) {
    for (int key = 0; key < keys; key += LANES) {
        uint32_t* panel = out + int64_t{key / PANEL} * PANEL * words + key % PANEL;
        for (int at = 0; at < words; at += LANES) {
            Words columns[LANES];
            transpose(rows + key, at, columns);
            for (int i = 0; i < LANES; i++) store_words(panel + int64_t{at + i} * PANEL, columns[i]);
        }
    }
}

// Values of TILE_KEYS rows as panels of 32 dimensions: [dim / 32][key][32], or [dim / 32][key / 2][32][2].
inline void pack_values(const void* const* rows, int head_pad, int keys, float* out) {
    for (int dim = 0; dim < head_pad; dim += PANEL)
        for (int key = 0; key < keys; key++)
            std::memcpy(out + (int64_t{dim} * TILE_KEYS + key * PANEL), static_cast<const float*>(rows[key]) + dim,
                        PANEL * 4);
}

// Pair 2 * LANES numbers of `a` with those of `b`.
#if defined(__AVX512BW__)
inline void interleave(const bf16* a, const bf16* b, Words& first, Words& second) {
    alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    first = _mm512_permutex2var_epi16(x, low, y);
    second = _mm512_permutex2var_epi16(x, high, y);
}
#elif defined(__AVX2__)
inline void interleave(const bf16* a, const bf16* b, Words& first, Words& second) {
    const __m256i x = load_words(a), y = load_words(b);
    const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
    first = _mm256_permute2x128_si256(low, high, 0x20);
    second = _mm256_permute2x128_si256(low, high, 0x31);
}
#elif defined(BATON_NEON)
inline void interleave(const bf16* a, const bf16* b, Words& first, Words& second) {
    const uint16x8x2_t pairs = vzipq_u16(vld1q_u16(a), vld1q_u16(b));
    first = vreinterpretq_u32_u16(pairs.val[0]), second = vreinterpretq_u32_u16(pairs.val[1]);
}
#else
inline void interleave(const bf16* a, const bf16* b, Words& first, Words& second) {
    first = a[0] | Words{b[0]} << 16;
    second = a[1] | Words{b[1]} << 16;
}
#endif

inline void pack_values(const void* const* rows, int head_pad, int keys, bf16* out) {
    for (int dim = 0; dim < head_pad; dim += 2 * LANES)
        for (int key = 0; key < keys; key += 2) {
            bf16* pairs = out + int64_t{dim / PANEL} * PANEL * TILE_KEYS + key * PANEL + dim % PANEL * 2;
            Words first, second;
            interleave(static_cast<const bf16*>(rows[key]) + dim, static_cast<const bf16*>(rows[key + 1]) + dim, first,
                       second);
            store_words(pairs, first);
            store_words(pairs + 2 * LANES, second);
        }
}

}  // namespace
}  // namespace baton
