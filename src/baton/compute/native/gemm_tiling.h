// Divide the work of a phase into items that threads claim.
#pragma once
#include <algorithm>

#include "types.h"

namespace baton {

constexpr int ROWS_PER_ITEM = 8;                       // of work on single rows: norms, quantization, routing
constexpr int64_t ACTIVATION_BLOCK_BYTES = 384 << 10;  // activations that stay in the second-level cache during a GEMM

inline int row_items(int rows) { return (rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM; }

// Return the maximum number of rows of a GEMM block.
inline int rows_per_block(int inputs, int64_t element_bytes) {
    return int(std::max<int64_t>(56, ACTIVATION_BLOCK_BYTES / (inputs * element_bytes)));
}

// The tiling of a GEMM. An item is a block of rows times one panel of outputs.
struct GemmTiling {
    int row_blocks, rows, block_rows, panels, threads;

    GemmTiling(int rows, const Linear& w, int64_t element_bytes, int threads)
        : rows(rows), panels(w.panel_count()), threads(threads) {
        const int rows_max = rows_per_block(w.inputs, element_bytes);
        row_blocks = (rows + rows_max - 1) / rows_max;
        block_rows = row_blocks == 0 ? 0 : (rows + row_blocks - 1) / row_blocks;
    }
    int items() const { return row_blocks * panels; }
    PanelItem at(int item) const {
        const int first = item / panels * block_rows, next = item + threads;  // threads claim items roughly in turn
        return {first, std::min(block_rows, rows - first), panel(item), next < items() ? panel(next) : NO_PANEL};
    }

private:
    // Order the panels so that a thread computes two adjacent ones in succession: their outputs may share cache lines,
    // which two threads would take from each other.
    int panel(int item) const {
        const int at = item % panels, group = at / (2 * threads) * (2 * threads), in_group = at - group;
        if (group + 2 * threads > panels) return at;
        return group + in_group % threads * 2 + in_group / threads;
    }
};

}  // namespace baton
