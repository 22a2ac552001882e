// Copy many runs of bytes in one call, without the interpreter between two runs. Large copies bypass the cache.

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__x86_64__)
constexpr std::size_t LINE = 64;
constexpr std::size_t AHEAD = 8 * LINE;

// Write whole cache lines with non-temporal stores: the target is not read first, which halves the memory traffic.
void stream(char* to, const char* from, std::size_t size) {
    const std::size_t head = std::min(size, -reinterpret_cast<std::uintptr_t>(to) & (LINE - 1));
    std::memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);  // a prefetch past the end has no effect
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to, from, size);
}

void finish_streams() { _mm_sfence(); }  // makes non-temporal stores visible to other threads
#else
void stream(char* to, const char* from, std::size_t size) { std::memcpy(to, from, size); }
void finish_streams() {}
#endif

}  // namespace

struct BatonMove {
    std::uint64_t from, to, size_bytes;
};

// Execute moves in order. If they have `past_cache_bytes` or more in all, use non-temporal stores.
extern "C" __attribute__((visibility("default"))) void baton_move(
    const BatonMove* moves, std::uint64_t count, std::uint64_t past_cache_bytes) {
    std::uint64_t total_bytes = 0;
    for (std::uint64_t index = 0; index < count; ++index) total_bytes += moves[index].size_bytes;
    const bool past_cache = total_bytes >= past_cache_bytes;
    for (std::uint64_t index = 0; index < count; ++index) {
        auto* to = reinterpret_cast<char*>(moves[index].to);
        const auto* from = reinterpret_cast<const char*>(moves[index].from);
        if (past_cache)
            stream(to, from, moves[index].size_bytes);
        else
            std::memcpy(to, from, moves[index].size_bytes);
    }
    finish_streams();
}
