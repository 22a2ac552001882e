// The functions that each instruction set provides to a step. table.h fills one table per set, in a separate file.
#pragma once
#include "types.h"

namespace baton {

// The operation on a panel's product.
using Product = void (*)(const Linear& w, Rows a, int first, int count, int panel, float* out, int64_t stride);

struct Kernels {
    const char* name;
    void (*enter)();  // every thread calls it when it begins a step, and leave() when it ends
    void (*leave)();
    void (*weight_row)(const Linear& w, int output, float* out, int count);
    void (*normalize_rows)(const float* x, int64_t stride, int hidden, const float* weight, float eps, int first,
                           int count, Number number, Rows out);
    // Round rows of `inputs` numbers to 8 bits, for quantized weights; see QuantRow.
    void (*quantize_rows)(Rows in, Number number, int inputs, int first, int count, void* out);
    int64_t (*quant_row_bytes)(int inputs);
    Product linear, linear_sum;
    void (*linear_gated)(const Linear& w, Rows a, int first, int count, int panel, Rows out);
    void (*add_weighted)(float* x, int hidden, const float* results, const int32_t* places, const float* weights,
                         int count);
    void (*place_token)(const Sizes& sizes, const Layer& layer, float* qkv, const float* angles, int token,
                        Queries queries, Number kv_number, uint8_t* keys, uint8_t* values);
    void (*place_latent)(const Sizes& sizes, const float* kv_norm, const LatentToken& from, Queries queries, Rows nope,
                         Number number, Number kv_number, uint8_t* slot);
    void (*linear_rounded)(const Linear& w, Rows a, int first, int count, int panel, Rows out, Number number);
    int64_t (*attention_floats)(const Sizes& sizes, int rows, int states);  // the memory of attend() for this many rows
    // next: the item that this thread will probably compute next, to prefetch its first keys; or null.
    void (*attend)(const Attention& call, const AttentionItem& item, const AttentionItem* next, float* memory);
    void (*merge_parts)(const Attention& call, const AttentionItem& item, float* memory);
};

extern const Kernels PLAIN, AVX2, AVX512, AVX512BF16, AMX;

}  // namespace baton
