// Products of bfloat16 in AMX tiles. BATON_EMULATE_AMX emulates the instructions in software, to the bit, so that tests
// run on machines without AMX.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and LDTILECFG.
#pragma once
#include "panel_prefetcher.h"
#include "simd.h"

namespace baton {
namespace {

constexpr int TILE_ROWS = 16, TILE_PAIRS = 16;  // a tile is 16 rows of 64 bytes

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(BATON_EMULATE_AMX)

struct TileState {
    TileShapes shapes;
    uint8_t bytes[8][TILE_ROWS][64];
};
thread_local TileState tiles;

inline void tile_configure(const TileShapes* shapes) { tiles.shapes = *shapes; }
inline void tile_release() {}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    for (int r = 0; r < tiles.shapes.rows[T]; r++)
        std::memcpy(tiles.bytes[T][r], static_cast<const uint8_t*>(from) + r * stride, tiles.shapes.row_bytes[T]);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    for (int r = 0; r < tiles.shapes.rows[T]; r++)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.bytes[T][r], tiles.shapes.row_bytes[T]);
}
template <int T>
inline void tile_clear() {
    std::memset(tiles.bytes[T], 0, sizeof tiles.bytes[T]);
}
template <class Element>
inline Element tile_element(int tile, int row, int at) {
    Element element;
    std::memcpy(&element, tiles.bytes[tile][row] + at * int(sizeof element), sizeof element);
    return element;
}
// As the processor: the first and the second numbers of all pairs are summed apart, and their sum is added to C.
template <int C, int A, int B>
inline void tile_multiply() {
    for (int r = 0; r < tiles.shapes.rows[C]; r++)
        for (int n = 0; n < tiles.shapes.row_bytes[C] / 4; n++) {
            float sums[2] = {};
            for (int pair = 0; pair < tiles.shapes.row_bytes[A] / 4; pair++)
                for (int i = 0; i < 2; i++)
                    sums[i] = std::fmaf(from_bf16(tile_element<bf16>(A, r, 2 * pair + i)),
                                        from_bf16(tile_element<bf16>(B, pair, 2 * n + i)), sums[i]);
            const float sum = tile_element<float>(C, r, n) + (sums[0] + sums[1]);
            std::memcpy(tiles.bytes[C][r] + n * 4, &sum, 4);
        }
}

// Macros, because gcc's intrinsics need the tile number as a literal.
#define TILE_LOAD(tile, from, stride) tile_load<tile>(from, stride)
#define TILE_STORE(tile, to, stride) tile_store<tile>(to, stride)
#define TILE_CLEAR(tile) tile_clear<tile>()
#define TILE_MULTIPLY(c, a, b) tile_multiply<c, a, b>()

#else

inline void tile_configure(const TileShapes* shapes) {
    asm volatile("" : : "r"(shapes) : "memory");  // gcc 12 does not know that all of the shapes are read
    _tile_loadconfig(shapes);
}
inline void tile_release() { _tile_release(); }
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_CLEAR(tile) _tile_zero(tile)
#define TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

#endif

// Tiles 0-3 hold sums [2 of rows][2 of columns], tiles 4-5 rows of activations, tiles 6-7 columns of weights.
constexpr int AMX_ROWS_MAX = 2 * TILE_ROWS;
thread_local int shaped_rows = 0;  // the rows that the tiles are configured for; 0: not configured

inline void shape_tiles(int rows) {
    if (rows == shaped_rows) return;
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first > 0 ? rows - first : 1;
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = TILE_ROWS;
    }
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = uint8_t(first);
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = uint8_t(second);
    tile_configure(&shapes);
    shaped_rows = rows;
}

inline void release_tiles() {
    if (shaped_rows != 0) tile_release();
    shaped_rows = 0;
}

// c[rows][32] (+)= a[rows][inputs] x panel, for 1 .. AMX_ROWS_MAX rows and inputs that are a multiple of 32.
template <bool ADD, class Prefetcher>
inline void multiply_tiles(int rows, const bf16* a, int64_t stride, const bf16* panel, int inputs, float* c,
                           int64_t c_stride, Prefetcher& prefetcher) {
    asm volatile("" ::: "memory");  // gcc 12 does not know that tile loads read memory
    shape_tiles(rows);
    const bool two = rows > TILE_ROWS;
    float* lower = c + TILE_ROWS * c_stride;
    if constexpr (ADD) {
        TILE_LOAD(0, c, c_stride * 4);
        TILE_LOAD(1, c + TILE_PAIRS, c_stride * 4);
        if (two) TILE_LOAD(2, lower, c_stride * 4);
        if (two) TILE_LOAD(3, lower + TILE_PAIRS, c_stride * 4);
    } else {
        TILE_CLEAR(0);
        TILE_CLEAR(1);
        TILE_CLEAR(2);
        TILE_CLEAR(3);
    }
    for (int k = 0; k < inputs; k += 2 * TILE_PAIRS) {
        const bf16* b = panel + int64_t{k} * PANEL;
        prefetcher.prefetch_lines();
        TILE_LOAD(6, b, PANEL * 4);
        TILE_LOAD(7, b + 2 * TILE_PAIRS, PANEL * 4);
        TILE_LOAD(4, a + k, stride * 2);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        if (!two) continue;
        TILE_LOAD(5, a + TILE_ROWS * stride + k, stride * 2);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
    TILE_STORE(0, c, c_stride * 4);
    TILE_STORE(1, c + TILE_PAIRS, c_stride * 4);
    if (two) TILE_STORE(2, lower, c_stride * 4);
    if (two) TILE_STORE(3, lower + TILE_PAIRS, c_stride * 4);
}

}  // namespace
}  // namespace baton
