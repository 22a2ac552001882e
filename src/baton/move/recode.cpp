// Convert strided runs of cells from one KV format to another in one call, with the best instructions of this processor.

#include "recode_call.h"

using baton::RecodeCall;

static int (*best_version())(const RecodeCall&) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx2 && avx512 ? baton::recode_avx512 : avx2 ? baton::recode_avx2 : baton::recode_plain;
#else
    return baton::recode_plain;  // the compiler vectorizes it for NEON, which every such processor has
#endif
}

// Convert from one memory into another. Returns 0, or -1 if no head has `dim` numbers. Distances are in bytes.
extern "C" __attribute__((visibility("default"))) int baton_recode(const uint8_t* from, uint8_t* to,
                                                                   int32_t source_format, int32_t target_format,
                                                                   int32_t dim, const int64_t* geometry) {
    static const auto version = best_version();
    return version({from, to, source_format, target_format, dim, geometry});
}
