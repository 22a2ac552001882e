// What this machine can do at most: bytes read a second, and multiply-adds a second, by all threads together.
#include <immintrin.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

template <class F>
double seconds_of(int threads, F body) {
    std::vector<std::thread> running;
    const auto started = std::chrono::steady_clock::now();
    for (int thread = 1; thread < threads; thread++) running.emplace_back([=] { body(thread); });
    body(0);
    for (std::thread& thread : running) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

volatile float sink;

}  // namespace

extern "C" {

void* limits_memory(int64_t bytes) {
    void* data = std::aligned_alloc(2 << 20, size_t(bytes));
    madvise(data, size_t(bytes), MADV_HUGEPAGE);  // the most that reads can be: small pages are slower
    for (int64_t i = 0; i < bytes / 4; i++) static_cast<int32_t*>(data)[i] = int32_t(i);
    return data;
}

void limits_free(void* data) { std::free(data); }

// Seconds to read `bytes` once, each thread its own part.
double limits_read(const void* data, int64_t bytes, int threads) {
    const int64_t part = bytes / threads / 512 * 512;
    return seconds_of(threads, [=](int thread) {
        const char* from = static_cast<const char*>(data) + thread * part;
#if defined(__AVX512F__)
        __m512i sums[8] = {};
        for (int64_t at = 0; at < part; at += 512)
            for (int i = 0; i < 8; i++)
                sums[i] = _mm512_add_epi32(sums[i], _mm512_load_si512(from + at + i * 64));
        for (int i = 1; i < 8; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
        sink = float(_mm512_reduce_add_epi32(sums[0]));
#else
        __m256i sums[8] = {};
        for (int64_t at = 0; at < part; at += 256)
            for (int i = 0; i < 8; i++)
                sums[i] = _mm256_add_epi32(sums[i], _mm256_load_si256((const __m256i*)(from + at + i * 32)));
        for (int i = 1; i < 8; i++) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
        sink = float(_mm256_extract_epi32(sums[0], 0));
#endif
    });
}

// Floating-point operations of one call of limits_dot, all threads together.
double limits_dot_operations(int64_t rounds, int threads, int bf16) {
#if defined(__AVX512F__)
    return double(rounds) * threads * 12 * 16 * (bf16 ? 4 : 2);
#else
    return double(rounds) * threads * 12 * 8 * 2;
#endif
}

// Seconds of `rounds` x 12 independent multiply-adds from registers. bf16: pairs of bfloat16, where there are such.
double limits_dot(int64_t rounds, int threads, int bf16) {
    return seconds_of(threads, [=](int) {
#if defined(__AVX512F__)
        __m512 sums[12];
        for (int i = 0; i < 12; i++) sums[i] = _mm512_set1_ps(float(i));
        const __m512 x = _mm512_set1_ps(1.0001f), y = _mm512_set1_ps(0.9999f);
#if defined(__AVX512BF16__)
        if (bf16) {
            const __m512bh a = (__m512bh)_mm512_castps_si512(x), b = (__m512bh)_mm512_castps_si512(y);
            for (int64_t round = 0; round < rounds; round++)
                for (int i = 0; i < 12; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
        } else
#endif
            for (int64_t round = 0; round < rounds; round++)
                for (int i = 0; i < 12; i++) sums[i] = _mm512_fmadd_ps(x, y, sums[i]);
        for (int i = 1; i < 12; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
        sink = _mm512_reduce_add_ps(sums[0]);
#else
        __m256 sums[12];
        for (int i = 0; i < 12; i++) sums[i] = _mm256_set1_ps(float(i));
        const __m256 x = _mm256_set1_ps(1.0001f), y = _mm256_set1_ps(0.9999f);
        for (int64_t round = 0; round < rounds; round++)
            for (int i = 0; i < 12; i++) sums[i] = _mm256_fmadd_ps(x, y, sums[i]);
        for (int i = 1; i < 12; i++) sums[0] = _mm256_add_ps(sums[0], sums[i]);
        sink = _mm256_cvtss_f32(sums[0]);
#endif
    });
}

}  // extern "C"
