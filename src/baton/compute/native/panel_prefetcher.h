// Prefetch of the panel of weights that a thread computes next, while it computes the current one.
// The hardware's prefetcher stops at every small page, and stands still while a panel in the cache is used again for
// further rows: without this, steps of 6 to 16 rows read weights at two thirds of the memory's rate on Zen 4. On Zen 3,
// steps of 2 to 4 rows take up to 1.7 times as long.
#pragma once
#if defined(__AVX512F__)
#include <cpuid.h>
#endif

#include "types.h"

namespace baton {
namespace {

inline int tile_count(int rows, int rows_max) { return (rows + rows_max - 1) / rows_max; }

#if defined(__AVX512F__)
// Return whether this processor is a Zen 5 (AMD, family 26).
inline bool is_zen5() {
    static const bool found = [] {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        __get_cpuid(0, &eax, &ebx, &ecx, &edx);
        if (ecx != signature_AMD_ecx) return false;
        __get_cpuid(1, &eax, &ebx, &ecx, &edx);
        return ((eax >> 8) & 15) + ((eax >> 20) & 255) == 26;
    }();
    return found;
}
#endif

// Return the fewest rows for which prefetching saves time. For fewer, the hardware's prefetcher alone is faster: on
// Zen 4, one row of bfloat16 would take 1.4 times as long. Measured on Zen 3, 4 and 5.
inline int prefetch_rows_min([[maybe_unused]] bool has_4_bits) {
#if defined(__AVX512F__)
    return !is_zen5() ? 5 : has_4_bits ? 1 : 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 5;
#endif
}

constexpr int PREFETCH_ROWS_MAX = 64;  // for more, the time to read weights does not count

class PanelPrefetcher {
public:
    // Return whether prefetching saves time.
    static bool pays(const PanelItem& item, bool has_4_bits, int rows_max = PREFETCH_ROWS_MAX) {
        return item.next != NO_PANEL && item.count >= prefetch_rows_min(has_4_bits) && item.count <= rows_max;
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

// The columns of an item in its output. Prefetch of the rows of a tile before its products: without this, the writes of
// a long prompt wait for lines of the third-level cache or memory.
class OutputRows {
public:
    OutputRows(Rows out, int64_t element_bytes, int64_t column, int count)
        : data_(static_cast<const uint8_t*>(out.data) + column * element_bytes),
          stride_bytes_(out.stride * element_bytes), bytes_(count * element_bytes) {}

    void prefetch(int row, int rows) const {
        for (int r = row; r < row + rows; r++)
            for (int64_t at = 0; at < bytes_; at += 64) __builtin_prefetch(data_ + r * stride_bytes_ + at, 1, 3);
    }

private:
    const uint8_t* data_;
    int64_t stride_bytes_, bytes_;
};

// Prefetches nothing.
struct NoPrefetcher {
    void prefetch_two_lines() {}
    void prefetch_lines() {}
};

}  // namespace
}  // namespace baton
