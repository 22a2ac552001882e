// The functions that each instruction set provides to a step. table.h fills one table per set, in a separate file.
#pragma once
#include "types.h"

namespace baton {

// Multiply rows with a panel of weights; see gemm.h.
using PanelKernel = void (*)(const Linear& w, Rows a, const PanelItem& item, float* out, int64_t stride);

struct Kernels {
    const char* name;
    void (*enter)();  // every thread calls it when it begins a step, and leave() when it ends
    void (*leave)();
    void (*unpack_weight_row)(const Linear& w, int output, float* out, int count);
    void (*rms_norm_rows)(const float* x, int64_t stride, int hidden, const float* weight, float eps, int first,
                          int count, DType dtype, Rows out);
    // Quantize rows of `inputs` numbers to 8 bits, for quantized weights; see QuantRow.
    void (*quantize_rows)(Rows in, DType dtype, int inputs, int first, int count, void* out);
    int64_t (*quant_row_bytes)(int inputs);
    PanelKernel linear, linear_sum;
    void (*linear_gated)(const Linear& w, Rows a, const PanelItem& item, Rows out);
    void (*add_weighted_rows)(float* x, int hidden, const float* results, const int32_t* places, const float* weights,
                              int count);
    void (*rope_and_write_kv)(const Sizes& sizes, const Layer& layer, float* qkv, const float* angles, int token,
                              Queries queries, DType kv_dtype, uint8_t* keys, uint8_t* values);
    void (*rope_and_write_latent)(const Sizes& sizes, const float* kv_norm, const LatentToken& from, Queries queries,
                                  Rows nope, DType dtype, DType kv_dtype, uint8_t* slot);
    void (*linear_to_dtype)(const Linear& w, Rows a, const PanelItem& item, Rows out, DType dtype);
    int64_t (*attention_floats)(const Sizes& sizes, int rows, int states);  // scratch of attend()
    // next: the item that this thread will probably compute next, to prefetch its first keys; or null.
    void (*attend)(const Attention& call, const AttentionItem& item, const AttentionItem* next, float* memory);
    void (*merge_partials)(const Attention& call, const AttentionItem& item, float* memory);
};

extern const Kernels PLAIN;
// Weak: a library has those of its kind of machine, and perhaps only those that one processor can execute.
extern const Kernels AVX2 __attribute__((weak)), AVXVNNI __attribute__((weak)), AVX512 __attribute__((weak)),
    AVX512BF16 __attribute__((weak)), AMX __attribute__((weak)), NEON __attribute__((weak)), NEON_DOT __attribute__((weak));

}  // namespace baton
