// The structures of the C interface, with the fields of those in library.py.
#pragma once
#include <cstdint>

extern "C" {

struct BatonLatentSizes {  // as LatentSizes; kv_rank is 0 without latent attention
    int32_t q_rank, kv_rank, rope_dim, nope_dim, value_dim;
    float score_scale;
};

struct BatonModel {
    int32_t layers, hidden, heads, kv_heads, head_dim, vocab;
    float rms_eps;
    int32_t dtype;  // 0: float32, 1: bfloat16
    int32_t kv_dtype;
    int32_t block_tokens;
    int32_t threads;
    const char* kernels;
    const int32_t* cores;  // [threads], or null
    BatonLatentSizes latent;
};

struct BatonMatrix {
    const void* data;
    const float* bias;
    int32_t rows, inputs;
    int32_t dtype;  // as in types.h: the type of `data`; quantized weights have a byte per number
    const void *scales, *minimums;
};

struct BatonLayer {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    BatonMatrix qkv, o;
    int32_t window;
};

struct BatonLatent {
    const float *q_norm, *kv_norm;  // [q_rank] or null, [kv_rank]
    BatonMatrix queries;            // from q_rank; without data if that is 0
    BatonMatrix keys, values;       // [heads * kv_rank, nope_dim] and [heads * value_dim, kv_rank], never quantized
};

struct BatonMlp {
    BatonMatrix gate_up, down;
};

struct BatonRouter {
    BatonMatrix scores;  // always float32
    int32_t experts, used, normalized, sigmoid;
    int32_t groups, groups_used, group_best;
    float scale;
    const float* choice_bias;  // [experts], or null
};

struct BatonStep {
    int32_t slices, rows, entries, positions;
    const int32_t* tokens;           // [rows]
    const int32_t *counts, *starts;  // [slices]
    const int32_t* blocks;           // [entries]: the slices' block tables, one after the other
    const int32_t* block_counts;     // [slices]
    const float* angles;             // [positions][rotary dimensions of a head]
    int32_t* layers_done;            // counts the layers whose keys and values are written
    const int32_t* read;             // [slices]: how many last tokens are projected or read afterwards; or null: all
};

}  // extern "C"
