// GEMM of activation rows with weights packed in panels of 32 outputs. Each output adds its inputs in order, for any
// number of rows computed together, so a row's bits do not depend on the other rows (batch invariance).
#pragma once
#include <algorithm>

#include "quant_gemm.h"
#if defined(BATON_AMX)
#include "amx.h"
#endif

namespace baton {
namespace {

// The sums that one pass over a panel's inputs keeps: of at most `rows` rows, `vectors` each.
struct SumsBlock {
    int rows, vectors;
    constexpr int passes() const { return PANEL / (vectors * LANES); }
};
#if defined(__AVX512F__)
constexpr SumsBlock SUMS_F32{14, 2}, SUMS_BF16{14, 2};  // 28 of 32 registers
#elif defined(__AVX2__)
constexpr SumsBlock SUMS_F32{6, 2};   // 12 of 16 registers
constexpr SumsBlock SUMS_BF16{4, 4};  // a few do not fit, but one pass splits the pairs of a row only once
#elif defined(BATON_NEON)
constexpr SumsBlock SUMS_F32{5, 4}, SUMS_BF16{5, 4};  // 20 of 32 registers, 8 have the weights of bfloat16
#else
constexpr SumsBlock SUMS_F32{4, PANEL}, SUMS_BF16{4, PANEL};
#endif

// float32: one input at a time.
struct InF32 {
    using Element = float;
    static constexpr int K_STEP = 1;
    static constexpr SumsBlock SUMS = SUMS_F32;
    static constexpr int ROWS_MAX = SUMS.rows;

    template <int ROWS>
    static inline void step(const float* a, int64_t stride, const float* b, Vec (&sums)[ROWS][SUMS.vectors]) {
        Vec weights[SUMS.vectors];
        for (int v = 0; v < SUMS.vectors; v++) weights[v] = load(b + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Vec x = broadcast(a[r * stride]);
            for (int v = 0; v < SUMS.vectors; v++) sums[r][v] = fma(x, weights[v], sums[r][v]);
        }
    }
};

// bfloat16: two inputs at a time, exact products, float32 sums.
struct InBF16 {
    using Element = bf16;
    static constexpr int K_STEP = 2;
    static constexpr SumsBlock SUMS = SUMS_BF16;
#if defined(BATON_AMX)
    static constexpr int ROWS_MAX = AMX_ROWS_MAX;
#else
    static constexpr int ROWS_MAX = SUMS.rows;
#endif

    template <int ROWS>
    static inline void step(const bf16* a, int64_t stride, const bf16* b, Vec (&sums)[ROWS][SUMS.vectors]) {
        Words weights[SUMS.vectors];
        for (int v = 0; v < SUMS.vectors; v++) weights[v] = load_words(b + v * 2 * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < SUMS.vectors; v++)
                sums[r][v] = add_pair_products(a + r * stride, weights[v], sums[r][v]);
    }
};

// c[ROWS][32] (+)= a[ROWS][inputs] x panel. ADD: add to c.
template <class In, int ROWS, bool ADD, class Prefetcher>
void multiply_rows(const typename In::Element* a, int64_t stride, const typename In::Element* panel, int inputs,
                   float* c, int64_t c_stride, Prefetcher& prefetcher) {
    Prefetcher prefetching = prefetcher;  // in registers
    constexpr int VECTORS = In::SUMS.vectors;
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        Vec sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = ADD ? load(c + r * c_stride + column + v * LANES) : zero();
        const typename In::Element* b = panel + column * In::K_STEP;
        for (int k = 0; k < inputs; k += In::K_STEP) {
            In::template step<ROWS>(a + k, stride, b + int64_t{k} * PANEL, sums);
            prefetching.prefetch_two_lines();
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + column + v * LANES, sums[r][v]);
    }
    prefetcher = prefetching;
}

// The same for 1 .. In::ROWS_MAX rows.
template <class In, bool ADD, int ROWS = In::SUMS.rows, class Prefetcher>
inline void multiply(int rows, const typename In::Element* a, int64_t stride, const typename In::Element* panel,
                     int inputs, float* c, int64_t c_stride, Prefetcher& prefetcher) {
#if defined(BATON_AMX)
    if constexpr (In::K_STEP == 2) return multiply_tiles<ADD>(rows, a, stride, panel, inputs, c, c_stride, prefetcher);
#endif
    if constexpr (ROWS > 1) {
        if (rows < ROWS)
            return multiply<In, ADD, ROWS - 1>(rows, a, stride, panel, inputs, c, c_stride, prefetcher);
    }
    multiply_rows<In, ROWS, ADD>(a, stride, panel, inputs, c, c_stride, prefetcher);
}

// Divide `rows` into tiles of similar height, at most In::ROWS_MAX, and call with (first, count).
template <class In, class F>
inline void for_row_tiles(int rows, F compute) {
    const int tiles = tile_count(rows, In::ROWS_MAX);
    for (int tile = 0; tile < tiles; tile++) {
        const int first = int(int64_t{rows} * tile / tiles);
        compute(first, int(int64_t{rows} * (tile + 1) / tiles) - first);
    }
}

// ---- writing of a finished tile c[rows][32] --------------------------------------------------------------------

inline void add_bias(float* c, int rows, const float* bias) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < PANEL; i += LANES) store(c + r * PANEL + i, add(load(c + r * PANEL + i), load(bias + i)));
}

inline void write_tile(const float* c, int rows, float* out, int64_t stride, int columns) {
    for (int r = 0; r < rows; r++) {
        float* target = out + r * stride;
        if (columns == PANEL)
            for (int i = 0; i < PANEL; i += LANES) store(target + i, load(c + r * PANEL + i));
        else std::memcpy(target, c + r * PANEL, size_t(columns) * 4);
    }
}

inline void add_tile(const float* c, int rows, float* out, int64_t stride, int columns) {
    for (int r = 0; r < rows; r++) {
        float* target = out + r * stride;
        if (columns == PANEL)
            for (int i = 0; i < PANEL; i += LANES) store(target + i, add(load(target + i), load(c + r * PANEL + i)));
        else
            for (int i = 0; i < columns; i++) target[i] += c[r * PANEL + i];
    }
}

// A panel of gate and up, 16 of each: silu(gate) * up, 16 numbers.
template <class Element>
inline void write_gated_tile(const float* c, int rows, Element* out, int64_t stride) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < PANEL / 2; i += LANES) {
            const Vec gate = load(c + r * PANEL + i), up = load(c + r * PANEL + PANEL / 2 + i);
            store(out + r * stride + i, mul(silu(gate), up));
        }
}

// ---- one panel of a linear layer for some rows ------------------------------------------------------------------

template <class In, class F, class Prefetcher>
inline void multiply_dense_panel(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish,
                                 Prefetcher prefetcher) {
    alignas(64) float c[In::ROWS_MAX * PANEL];
    using Element = typename In::Element;
    const Element* weights = static_cast<const Element*>(w.panels) + int64_t{item.panel} * PANEL * w.inputs;
    for_row_tiles<In>(item.count, [&](int offset, int rows) {
        const Element* x = static_cast<const Element*>(a.data) + (item.first + offset) * a.stride;
        out.prefetch(item.first + offset, rows);
        multiply<In, false>(rows, x, a.stride, weights, w.inputs, c, PANEL, prefetcher);
        if (w.bias != nullptr) add_bias(c, rows, w.bias + item.panel * PANEL);
        finish(c, item.first + offset, rows);
    });
}

#if defined(BATON_AMX)

// The work between the products of some rows, which leave the vector units idle: the rows before are finished, and the
// outputs of these rows and the next panel are prefetched.
template <class F, class Prefetcher>
struct BetweenProducts {
    const Linear& w;
    const PanelItem& item;
    const OutputRows& out;
    F finish;
    Prefetcher prefetcher;
    int steps;                        // between which the work is divided
    float* sums = nullptr;            // [rows][32], the sums of the rows before
    int row = 0, left = 0;            // those that are not finished
    int output_row = 0, outputs = 0;  // the outputs that are not prefetched

    void begin(int first, int rows) { output_row = first, outputs = rows; }
    void end(float* c, int first, int rows) {
        finish_rows(left);
        sums = c, row = first, left = rows;
    }
    // Finish some of the rows before; all of them after the last products.
    void finish_rows(int count) {
        if (w.bias != nullptr) add_bias(sums, count, w.bias + item.panel * PANEL);
        finish(sums, row, count);
        sums += count * PANEL, row += count, left -= count;
    }
    void prefetch_lines() {
        prefetcher.prefetch_lines();
        const int rows = tile_count(AMX_ROWS_MAX, steps), fetched = std::min(outputs, rows);
        out.prefetch(output_row, fetched);
        output_row += fetched, outputs -= fetched;
        if (left > 0) finish_rows(std::min(left, rows));
    }
};

template <class F, class Prefetcher>
inline void multiply_panel_in_tiles(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish,
                                    Prefetcher prefetcher) {
    alignas(64) float c[2][AMX_ROWS_MAX * PANEL];
    const bf16* weights = static_cast<const bf16*>(w.panels) + int64_t{item.panel} * PANEL * w.inputs;
    BetweenProducts<F, Prefetcher> between{w, item, out, finish, prefetcher, w.inputs / INPUTS_ALIGN};
    int turn = 0;
    for_row_tiles<InBF16>(item.count, [&](int offset, int rows) {
        const int first = item.first + offset;
        between.begin(first, rows);
        multiply_tiles<false>(rows, static_cast<const bf16*>(a.data) + first * a.stride, a.stride, weights, w.inputs,
                              c[turn], PANEL, between);
        between.end(c[turn], first, rows);
        turn = 1 - turn;
    });
    between.finish_rows(between.left);
}

#endif

template <class In, class F>
inline void multiply_dense_panel(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish) {
    const auto multiply_with = [&](auto prefetcher) {
#if defined(BATON_AMX)
        if constexpr (In::K_STEP == 2) return multiply_panel_in_tiles(w, a, item, out, finish, prefetcher);
#endif
        multiply_dense_panel<In>(w, a, item, out, finish, prefetcher);
    };
    const bool tiled = In::ROWS_MAX > In::SUMS.rows;  // in AMX tiles, where the time to read weights always counts
    if (!PanelPrefetcher::pays(item, false, tiled ? item.count : PREFETCH_ROWS_MAX))
        return multiply_with(NoPrefetcher());
    const int64_t panel_bytes = int64_t{PANEL} * w.inputs * int64_t(sizeof(typename In::Element));
    const int passes = (tiled ? 1 : In::SUMS.passes()) * tile_count(item.count, In::ROWS_MAX);
    const int steps = w.inputs / (tiled ? INPUTS_ALIGN : In::K_STEP);
    const PanelPrefetcher prefetcher(static_cast<const uint8_t*>(w.panels), panel_bytes, item, steps, passes);
    multiply_with(prefetcher);
}

template <class F>
inline void multiply_panel(const Linear& w, Rows a, const PanelItem& item, const OutputRows& out, F finish) {
    switch (w.dtype) {
        case DType::F32: return multiply_dense_panel<InF32>(w, a, item, out, finish);
        case DType::BF16: return multiply_dense_panel<InBF16>(w, a, item, out, finish);
        default: break;
    }
    with_format(w.dtype, [&](auto format) { multiply_quant_panel<decltype(format)>(w, a, item, out, finish); });
}

inline int panel_columns(const Linear& w, int panel) {
    const int left = w.outputs - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

// out[row][output] = a x w
void linear(const Linear& w, Rows a, const PanelItem& item, float* out, int64_t stride) {
    const OutputRows written({out, stride}, 4, item.panel * PANEL, PANEL);
    multiply_panel(w, a, item, written, [&](const float* c, int row, int rows) {
        write_tile(c, rows, out + row * stride + item.panel * PANEL, stride, panel_columns(w, item.panel));
    });
}

// out[row][output] += a x w
void linear_sum(const Linear& w, Rows a, const PanelItem& item, float* out, int64_t stride) {
    const OutputRows written({out, stride}, 4, item.panel * PANEL, PANEL);
    multiply_panel(w, a, item, written, [&](const float* c, int row, int rows) {
        add_tile(c, rows, out + row * stride + item.panel * PANEL, stride, panel_columns(w, item.panel));
    });
}

// out[row] = silu(a x gate) * (a x up), in the type of the next GEMM
void linear_gated(const Linear& w, Rows a, const PanelItem& item, Rows out) {
    const int64_t column = item.panel * (PANEL / 2), element_bytes = w.rows_dtype == DType::BF16 ? 2 : 4;
    const OutputRows written(out, element_bytes, column, PANEL / 2);
    multiply_panel(w, a, item, written, [&](const float* c, int row, int rows) {
        if (w.rows_dtype == DType::BF16)
            write_gated_tile(c, rows, static_cast<bf16*>(out.data) + row * out.stride + column, out.stride);
        else write_gated_tile(c, rows, static_cast<float*>(out.data) + row * out.stride + column, out.stride);
    });
}

}  // namespace
}  // namespace baton
