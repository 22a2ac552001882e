// Prefetch of the panel of weights that a thread computes next, while it computes the current one.
// The hardware's prefetcher stops at every small page, and stands still while a panel in the cache is used again for
// further rows: without this, steps of 6 to 16 rows read weights at two thirds of the memory's rate on Zen 4. On Zen 3,
// steps of 2 to 4 rows take up to 1.7 times as long.
#pragma once
#include "types.h"

namespace baton {
namespace {

inline int tile_count(int rows, int rows_max) { return (rows + rows_max - 1) / rows_max; }

// The fewest rows for which prefetching saves time, and with 4-bit weights. For fewer, the hardware's prefetcher alone is
// faster. Measured on Zen 5 (AVX-512) and Zen 3 (AVX2).
#if defined(__AVX512F__)
constexpr int PREFETCH_ROWS_MIN = 2, PREFETCH_ROWS_MIN_4_BITS = 1;
#elif defined(__AVX2__)
constexpr int PREFETCH_ROWS_MIN = 1, PREFETCH_ROWS_MIN_4_BITS = 1;
#else
constexpr int PREFETCH_ROWS_MIN = 5, PREFETCH_ROWS_MIN_4_BITS = 5;
#endif
constexpr int PREFETCH_ROWS_MAX = 64;  // for more, the time to read weights does not count

class PanelPrefetcher {
public:
    // Return whether prefetching saves time.
    static bool pays(const PanelItem& item, int rows_min = PREFETCH_ROWS_MIN) {
        return item.next != NO_PANEL && item.count >= rows_min && item.count <= PREFETCH_ROWS_MAX;
    }

    // Spread the next panel evenly over `passes` over the current one's inputs, of `steps` each.
    PanelPrefetcher(const uint8_t* panels, int64_t panel_bytes, const PanelItem& item, int steps, int passes)
        : next_(panels + item.next * panel_bytes), step_bytes_(panel_bytes / (int64_t{steps} * passes)) {}

    // Into the second-level cache: a panel does not fit into the first. Without a branch, in the innermost loop.
    void prefetch_two_lines() {
        __builtin_prefetch(next_, 0, 2);
        __builtin_prefetch(next_ + 64, 0, 2);
        next_ += step_bytes_;
    }

    void prefetch_lines() {
        for (int64_t at = 0; at < step_bytes_; at += 64) __builtin_prefetch(next_ + at, 0, 2);
        next_ += step_bytes_;
    }

private:
    const uint8_t* next_;
    int64_t step_bytes_;
};

// Prefetches nothing.
struct NoPrefetcher {
    void prefetch_two_lines() {}
    void prefetch_lines() {}
};

}  // namespace
}  // namespace baton
