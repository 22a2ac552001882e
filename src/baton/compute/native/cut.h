// Divide the work on the rows of a step into items.
#pragma once
#include <algorithm>

#include "types.h"

namespace baton {

constexpr int NORM_ROWS = 8;              // rows of a norm item
constexpr int64_t BLOCK_BYTES = 384 << 10;  // activations that fit into the second-level cache during a product

inline int norm_items(int rows) { return (rows + NORM_ROWS - 1) / NORM_ROWS; }

// The maximum number of rows that are multiplied together.
inline int block_rows(int inputs, int64_t cell_bytes) {
    return int(std::max<int64_t>(56, BLOCK_BYTES / (inputs * cell_bytes)));
}

// A product divided into items: some rows times one panel.
struct Cut {
    int row_blocks, rows, block, panels;

    Cut(int rows, const Linear& w, int64_t cell_bytes) : rows(rows), panels(w.panel_count()) {
        const int fit = block_rows(w.inputs, cell_bytes);
        row_blocks = (rows + fit - 1) / fit;
        block = row_blocks == 0 ? 0 : (rows + row_blocks - 1) / row_blocks;
    }
    int items() const { return row_blocks * panels; }
    int panel(int item) const { return item % panels; }
    int first(int item) const { return item / panels * block; }
    int count(int item) const { return std::min(block, rows - first(item)); }
};

}  // namespace baton
