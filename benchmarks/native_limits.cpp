// What this machine can do at most: bytes read from memory, and products of registers, on some threads at once.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// Widest registers of this build: AVX-512, or else AVX2. STEPS rounds of CHAINS independent multiply-adds of LANES.
constexpr long STEPS = 1000000;
#ifdef __AVX512F__
constexpr int CHAINS = 24, LANES = 16;
#define REGISTER "zmm"
using Vector = __m512;
Vector load(const float* data) { return _mm512_loadu_ps(data); }
Vector add(Vector one, Vector other) { return _mm512_add_ps(one, other); }
#else
constexpr int CHAINS = 8, LANES = 8;
#define REGISTER "ymm"
using Vector = __m256;
Vector load(const float* data) { return _mm256_loadu_ps(data); }
Vector add(Vector one, Vector other) { return _mm256_add_ps(one, other); }
#endif

void read(const float* data, size_t count) {
    Vector sums[8] = {};
    for (size_t i = 0; i + 8 * LANES <= count; i += 8 * LANES)
        for (int j = 0; j < 8; j++) sums[j] = add(sums[j], load(data + i + j * LANES));
    for (int j = 1; j < 8; j++) sums[0] = add(sums[0], sums[j]);
    float parts[LANES];
    memcpy(parts, sums, sizeof parts);
    for (float part : parts) sink = sink + part;
}

#define CHAIN(op, to) op " %%" REGISTER "0, %%" REGISTER "0, %%" REGISTER #to "\n"
#define CHAIN_8(op, a, b, c, d, e, f, g, h) \
    CHAIN(op, a) CHAIN(op, b) CHAIN(op, c) CHAIN(op, d) CHAIN(op, e) CHAIN(op, f) CHAIN(op, g) CHAIN(op, h)
#ifdef __AVX512F__
#define CHAINS_OF(op) \
    CHAIN_8(op, 1, 2, 3, 4, 5, 6, 7, 8) CHAIN_8(op, 9, 10, 11, 12, 13, 14, 15, 16) \
    CHAIN_8(op, 17, 18, 19, 20, 21, 22, 23, 24)
#define CLOBBERED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24"
#else
#define CHAINS_OF(op) CHAIN_8(op, 1, 2, 3, 4, 5, 6, 7, 8)
#define CLOBBERED "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8"
#endif

void multiply_float32() {
    asm volatile("vxorps %%xmm0, %%xmm0, %%xmm0" ::: "xmm0");
    for (long i = 0; i < STEPS; i++) asm volatile(CHAINS_OF("vfmadd231ps")::: CLOBBERED);
}

#ifdef __AVX512F__
bool computes_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }

void multiply_bfloat16() {
    asm volatile("vxorps %%xmm0, %%xmm0, %%xmm0" ::: "xmm0");
    for (long i = 0; i < STEPS; i++) asm volatile(CHAINS_OF("vdpbf16ps")::: CLOBBERED);
}
#else
bool computes_bfloat16() { return false; }

void multiply_bfloat16() {}
#endif

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
        if (computes_bfloat16()) best(2, [](int) { multiply_bfloat16(); });
    }
    if (!computes_bfloat16()) {  // then bfloat16 is multiplied as float32
        wall_s[2] = wall_s[1];
        cpu_s[2] = cpu_s[1];
    }
    const double products = double(STEPS) * CHAINS * LANES * threads;
    const double amounts[3] = {double(count) * 4 * threads, 2 * products, (computes_bfloat16() ? 4 : 2) * products};
    printf("{\"bytes_per_s\": %.4g, \"float32_flops\": %.4g, \"bfloat16_flops\": %.4g, ", amounts[0] / wall_s[0],
           amounts[1] / wall_s[1], amounts[2] / wall_s[2]);
    printf("\"cpu_bytes_per_s\": %.4g, \"cpu_float32_flops\": %.4g, \"cpu_bfloat16_flops\": %.4g}\n",
           amounts[0] / cpu_s[0], amounts[1] / cpu_s[1], amounts[2] / cpu_s[2]);
}
