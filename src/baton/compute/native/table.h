// The body of a file that compiles all kernels for one instruction set: define TABLE as its name, then include this.
#include <xmmintrin.h>

#include "attention.h"
#include "kernels.h"
#include "latent.h"

namespace baton {
namespace {

// Steps treat denormal numbers as zero, because they are slow, and a sum with zero could change them.
constexpr unsigned FLUSH_DENORMALS = 0x8040;
thread_local unsigned mode_before;

void enter() {
    mode_before = _mm_getcsr();
    _mm_setcsr(mode_before | FLUSH_DENORMALS);
}

void leave() {
    _mm_setcsr(mode_before);
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
