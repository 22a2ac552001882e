// The body of a file that compiles all kernels for one instruction set: define TABLE as its name, then include this.
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attention.h"
#include "kernels.h"
#include "latent.h"

namespace baton {
namespace {

// Steps treat denormal numbers as zero, because they are slow, and a sum with zero could change them.
#if defined(__x86_64__)
constexpr uint64_t FLUSH_DENORMALS = 0x8040;
uint64_t float_mode() { return _mm_getcsr(); }
void set_float_mode(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#else
constexpr uint64_t FLUSH_DENORMALS = 1u << 24;  // FZ of FPCR
uint64_t float_mode() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
thread_local uint64_t mode_before;

void enter() {
    mode_before = float_mode();
    set_float_mode(mode_before | FLUSH_DENORMALS);
}

void leave() {
    set_float_mode(mode_before);
#if defined(BATON_AMX)
    release_tiles();
#endif
}

}  // namespace

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
extern const Kernels TABLE = {
    TEXT(TABLE), enter, leave, unpack_weight_row, rms_norm_rows, quantize_rows, QuantRow::bytes, linear, linear_sum,
    linear_gated, add_weighted_rows, rope_and_write_kv, rope_and_write_latent, linear_to_dtype,
    AttentionScratch::floats, attend, merge_partials,
};

}  // namespace baton
