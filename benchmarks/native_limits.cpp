// What this machine can do at most: bytes read from memory, and products of registers, on some threads at once.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

double cpu_seconds() {  // of the calling thread: leaves out the time that others had its core
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

// Wall seconds of body on some threads at once. cpu_s: the most CPU time that one of them took.
template <class F>
double seconds(int threads, double& cpu_s, F body) {
    std::vector<double> cpu(size_t(threads), 0.0);
    std::atomic<int> ready{0};
    std::vector<std::thread> helpers;
    const auto run = [&](int thread) {
        ready++;
        while (ready.load() < threads) {}
        const double start = cpu_seconds();
        body(thread);
        cpu[size_t(thread)] = cpu_seconds() - start;
    };
    for (int thread = 1; thread < threads; thread++) helpers.emplace_back(run, thread);
    const auto start = Clock::now();
    run(0);
    for (auto& helper : helpers) helper.join();
    const double wall_s = std::chrono::duration<double>(Clock::now() - start).count();
    for (double one : cpu) cpu_s = std::max(cpu_s, one);
    return wall_s;
}

volatile float sink;

void read(const float* data, size_t count) {
    __m512 sums[8] = {};
    for (size_t i = 0; i + 128 <= count; i += 128)
        for (int j = 0; j < 8; j++) sums[j] = _mm512_add_ps(sums[j], _mm512_loadu_ps(data + i + j * 16));
    for (int j = 1; j < 8; j++) sums[0] = _mm512_add_ps(sums[0], sums[j]);
    sink = _mm512_reduce_add_ps(sums[0]);
}

constexpr long STEPS = 1000000;
constexpr int CHAINS = 24;

// 24 independent chains of one instruction, in registers of their own.
#define CHAIN_8(op, a, b, c, d, e, f, g, h) \
    op " %%zmm0, %%zmm0, %%zmm" #a "\n" op " %%zmm0, %%zmm0, %%zmm" #b "\n" op " %%zmm0, %%zmm0, %%zmm" #c "\n" \
    op " %%zmm0, %%zmm0, %%zmm" #d "\n" op " %%zmm0, %%zmm0, %%zmm" #e "\n" op " %%zmm0, %%zmm0, %%zmm" #f "\n" \
    op " %%zmm0, %%zmm0, %%zmm" #g "\n" op " %%zmm0, %%zmm0, %%zmm" #h "\n"
#define CHAINS_OF(op) \
    CHAIN_8(op, 1, 2, 3, 4, 5, 6, 7, 8) CHAIN_8(op, 9, 10, 11, 12, 13, 14, 15, 16) \
    CHAIN_8(op, 17, 18, 19, 20, 21, 22, 23, 24)
#define CLOBBERED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24"

void multiply_float32() {
    asm volatile("vpxord %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
    for (long i = 0; i < STEPS; i++) asm volatile(CHAINS_OF("vfmadd231ps")::: CLOBBERED);
}

void multiply_bfloat16() {
    asm volatile("vpxord %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
    for (long i = 0; i < STEPS; i++) asm volatile(CHAINS_OF("vdpbf16ps")::: CLOBBERED);
}

// argv: threads, bytes to read. Prints one line of JSON: rates by the clock, and by the threads' CPU time.
int main(int, char** argv) {
    const int threads = atoi(argv[1]);
    const size_t count = size_t(atoll(argv[2])) / 4 / size_t(threads);
    std::vector<float*> pieces;
    for (int thread = 0; thread < threads; thread++) {
        const size_t bytes = (count * 4 + (2 << 20)) / (2 << 20) * (2 << 20);
        pieces.push_back(static_cast<float*>(aligned_alloc(2 << 20, bytes)));
        madvise(pieces.back(), bytes, MADV_HUGEPAGE);  // as weights have them: small pages are slower
        for (size_t i = 0; i < count; i++) pieces.back()[i] = 1.0f;
    }
    double wall_s[3] = {1e9, 1e9, 1e9}, cpu_s[3] = {1e9, 1e9, 1e9};
    const auto best = [&](int kind, auto body) {
        double cpu = 0.0;
        wall_s[kind] = std::min(wall_s[kind], seconds(threads, cpu, body));
        cpu_s[kind] = std::min(cpu_s[kind], cpu);
    };
    for (int repeat = 0; repeat < 5; repeat++) {
        best(0, [&](int thread) { read(pieces[size_t(thread)], count); });
        best(1, [](int) { multiply_float32(); });
        if (__builtin_cpu_supports("avx512bf16")) best(2, [](int) { multiply_bfloat16(); });
    }
    const double products = double(STEPS) * CHAINS * 16 * threads;
    const double amounts[3] = {double(count) * 4 * threads, 2 * products, 4 * products};
    printf("{\"bytes_per_s\": %.4g, \"float32_flops\": %.4g, \"bfloat16_flops\": %.4g, ", amounts[0] / wall_s[0],
           amounts[1] / wall_s[1], amounts[2] / wall_s[2]);
    printf("\"cpu_bytes_per_s\": %.4g, \"cpu_float32_flops\": %.4g, \"cpu_bfloat16_flops\": %.4g}\n",
           amounts[0] / cpu_s[0], amounts[1] / cpu_s[1], amounts[2] / cpu_s[2]);
}
