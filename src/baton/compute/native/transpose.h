// Pack the keys and values of a tile for a GEMM: keys transposed, values in pairs.
#pragma once
#include "simd.h"

namespace baton {
namespace {

#if defined(__AVX512F__)
// out[i][0..15] = rows[0..15][i] for 16 numbers of 4 bytes.
__attribute__((always_inline)) inline void transpose16(const void* const* rows, int64_t at, __m512i (&out)[16]) {
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

inline void transpose16(const void* const* rows, int64_t at, uint32_t* out, int64_t stride) {
    __m512i columns[16];
    transpose16(rows, at, columns);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * stride, columns[i]);
}
#else
inline void transpose16(const void* const* rows, int64_t at, uint32_t* out, int64_t stride) {
    for (int r = 0; r < 16; r++)
        for (int i = 0; i < 16; i++)
            std::memcpy(out + i * stride + r, static_cast<const uint32_t*>(rows[r]) + at + i, 4);
}
#endif

// Keys of TILE_KEYS rows as panels of 32 keys. `words`: 4-byte units of a padded row (one float32, two bfloat16).
inline void pack_keys(const void* const* rows, int words, int keys, uint32_t* out) {
    for (int key = 0; key < keys; key += 16) {
        uint32_t* panel = out + int64_t{key / PANEL} * PANEL * words + key % PANEL;
        for (int at = 0; at < words; at += 16) transpose16(rows + key, at, panel + int64_t{at} * PANEL, PANEL);
    }
}

// Values of TILE_KEYS rows as panels of 32 dimensions: [dim / 32][key][32], or [dim / 32][key / 2][32][2].
inline void pack_values(const void* const* rows, int head_pad, int keys, float* out) {
    for (int dim = 0; dim < head_pad; dim += PANEL)
        for (int key = 0; key < keys; key++)
            std::memcpy(out + (int64_t{dim} * TILE_KEYS + key * PANEL), static_cast<const float*>(rows[key]) + dim,
                        PANEL * 4);
}

#if defined(__AVX512BW__)
inline void interleave(const bf16* a, const bf16* b, __m512i& first, __m512i& second) {  // 32 of each
    alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    first = _mm512_permutex2var_epi16(x, low, y);
    second = _mm512_permutex2var_epi16(x, high, y);
}
#endif

inline void interleave(const bf16* a, const bf16* b, bf16* out) {
#if defined(__AVX512BW__)
    __m512i first, second;
    interleave(a, b, first, second);
    _mm512_storeu_si512(out, first);
    _mm512_storeu_si512(out + 32, second);
#else
    for (int i = 0; i < PANEL; i++) out[2 * i] = a[i], out[2 * i + 1] = b[i];
#endif
}

inline void pack_values(const void* const* rows, int head_pad, int keys, bf16* out) {
    for (int dim = 0; dim < head_pad; dim += PANEL)
        for (int key = 0; key < keys; key += 2)
            interleave(static_cast<const bf16*>(rows[key]) + dim, static_cast<const bf16*>(rows[key + 1]) + dim,
                       out + (int64_t{dim} * TILE_KEYS + key * PANEL));
}

}  // namespace
}  // namespace baton
