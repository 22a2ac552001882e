// The types that all parts of the native engine share: element types, weights, model sizes, and a step's ragged batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../move/kv_formats.h"

namespace baton {

using bf16 = uint16_t;  // the upper half of a float32

// The types of stored elements. I8 to Q4M are for weights only (quant.h), the last four for KV only (kv_dtype.h).
enum class DType : int32_t {
    F32 = 0, BF16 = 1, I8 = 2, Q8 = 3, Q4 = 4, Q4M = 5, KV_I8 = 6, KV_E4M3 = 7, KV_FP4 = 8, KV_MXFP4 = 9
};

constexpr bool is_quantized(DType dtype) { return dtype >= DType::I8 && dtype <= DType::Q4M; }

// The bytes of one head's keys (or values) of one token.
constexpr int64_t kv_head_bytes(DType dtype, int head_dim) { return cell_bytes(KVFormat(dtype), head_dim); }

// Weights are packed in panels of 32 outputs, the same for every instruction set:
// float32 as [panel][input][32], bfloat16 as [panel][input / 2][32][2] (pairs of inputs for dot instructions).
constexpr int PANEL = 32;
constexpr int INPUTS_ALIGN = 32;  // inputs are padded with zeros to a multiple of this: one AMX tile of bfloat16
// Attention processes keys in tiles that start at multiples of TILE_KEYS, within splits that start at multiples of
// SPLIT_KEYS (split-K). Both are fixed, so that the order of sums depends on positions only, not on batch, chunk or
// threads.
constexpr int TILE_KEYS = 64;
constexpr int SPLIT_KEYS = 256;
constexpr int HEAD_DIM_MAX = 1024;  // DeepSeek's latents have 576
constexpr float EMPTY_MAXIMUM =
    -1e30f;  // the running maximum before the first score; finite, so that differences are finite

constexpr int padded(int count, int align) { return (count + align - 1) / align * align; }

struct Linear {
    const void* panels = nullptr;
    const float* bias = nullptr;  // [panels * 32] in the panels' order, or null
    DType dtype = DType::F32;
    DType rows_dtype = DType::F32;  // the type of activations; for quantized weights they are rounded before the GEMM
    int outputs = 0;  // without padding
    int inputs = 0;   // with padding

    int panel_count() const { return (outputs + PANEL - 1) / PANEL; }
};

// The weights of latent attention other than `qkv`, whose outputs are the compressed query (or all queries) and the
// latent.
struct LatentLayer {
    const float* q_norm = nullptr;   // [q_rank], or null
    const float* kv_norm = nullptr;  // [kv_rank]
    Linear queries;                  // up projection of the compressed query, if q_rank is not 0
    std::vector<Linear> keys;        // per head, from nope_dim to kv_rank: projects a query into the latent space
    std::vector<Linear> values;      // per head, from kv_rank to value_dim: projects the attention output back
};

struct Layer {
    const float* input_norm = nullptr;  // [hidden]
    const float* mlp_norm = nullptr;
    const float* q_norm = nullptr;  // [head_dim], or null
    const float* k_norm = nullptr;
    Linear qkv, o;
    LatentLayer latent;
    int window = 0;  // the attention window in tokens, the own position included; 0: none
};

// The sizes of latent attention, which caches one vector [kv_rank + rope_dim] per token for all heads. It is their key,
// and its first kv_rank elements are their value. It counts as one KV head. All zero without latent attention.
// Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
constexpr float LATENT_NORM_EPS = 1e-6f;  // for all models, as in torch/layers/latent.py
struct LatentSizes {
    int q_rank = 0;  // the width of the bottleneck before queries; 0: none
    int kv_rank = 0, rope_dim = 0;
    int nope_dim = 0;   // the part of a query that is projected into the latent space
    int value_dim = 0;  // a head's output after the projection back

    int query_dim() const { return nope_dim + rope_dim; }
    int nope_pad() const { return padded(nope_dim, INPUTS_ALIGN); }
};

struct Sizes {
    int layers, hidden, heads, kv_heads, head_dim, vocab;
    float rms_eps;
    float score_scale;  // factor on scores before the softmax
    LatentSizes latent;

    bool is_latent() const { return latent.kv_rank > 0; }
    int group() const { return heads / kv_heads; }
    int head_pad() const { return padded(head_dim, INPUTS_ALIGN); }
    int rotary_dim() const { return is_latent() ? latent.rope_dim : head_dim; }
    // The elements of a value that attention sums.
    int value_dim() const { return is_latent() ? latent.kv_rank : head_dim; }
    int value_pad() const { return padded(value_dim(), INPUTS_ALIGN); }
};

// Block ids from here on name slots of the spill space, as SPILLED_FROM of core/spill.py.
constexpr int32_t SPILLED_FROM = 1 << 30;

// The KV blocks of the arena: [block][layers][planes][block_tokens][kv_heads][head_dim]; and those of the spill space,
// which are only read: [layers][slot][planes][block_tokens][kv_heads][head_dim].
struct Arena {
    uint8_t* bytes = nullptr;
    int64_t blocks = 0;
    int block_tokens = 0;
    int layers = 0;
    int planes = 2;           // keys and values; 1: latents
    int64_t token_bytes = 0;  // of one token in one plane
    DType dtype = DType::F32;
    uint8_t* spill = nullptr;
    int64_t spill_slots = 0;

    int64_t plane_bytes() const { return block_tokens * token_bytes; }
    uint8_t* row(int32_t block, int layer, int plane, int slot) const {
        if (block >= SPILLED_FROM) {
            const int64_t before = (int64_t{layer} * spill_slots + (block - SPILLED_FROM)) * planes + plane;
            return spill + before * plane_bytes() + slot * token_bytes;
        }
        const int64_t before = (int64_t{block} * layers + layer) * planes + plane;
        return bytes + before * plane_bytes() + slot * token_bytes;
    }
};

// One request's part of a step: its tokens are rows [first, first + count), at positions from `start`.
struct Slice {
    int first, count, start;
    const int32_t* blocks;
};

// Rows of activations in the type of the GEMM that reads them. `stride` counts elements.
struct Rows {
    void* data;
    int64_t stride;
};

// Rows [first, first + count) of a GEMM times one panel of weights. `next`: the panel that this thread will probably
// compute next, which is prefetched meanwhile; or NO_PANEL.
struct PanelItem {
    int first, count, panel, next;
};
constexpr int NO_PANEL = -1;

// Queries [query, query + count) of a slice, heads [head, head_end) of its KV heads, splits [split, split_end).
struct AttentionItem {
    int slice, query, count;
    int head, head_end;
    int split, split_end;
    int partial;  // index of its first partial result if splits are separate items, else NO_PARTIAL
};
constexpr int NO_PARTIAL = -1;

// Queries of one layer: [kv_head][token][group][head_pad], so that query heads with one KV head (GQA) are adjacent.
struct Queries {
    void* data;
    DType dtype;
    int tokens;

    int64_t at(const Sizes& sizes, int kv_head, int token) const {
        return (int64_t{kv_head} * tokens + token) * sizes.group() * sizes.head_pad();
    }
};

// One token's queries and latent before RoPE, and its angles.
struct LatentToken {
    float* queries;       // [heads][nope_dim + rope_dim]
    float* latent;        // [kv_rank + rope_dim]
    const float* angles;  // [rope_dim]
    int token;
};

// The arguments that all attention items of one layer share.
struct Attention {
    const Sizes* sizes;
    const Arena* arena;
    const Slice* slices;
    int layer;
    int window;
    float scale;
    Queries queries;
    Rows out;      // [token][heads][out_dim], the first value_dim of these
    int out_dim;
    DType out_dtype;
    float* partials;  // [partial][2 + value_pad]: maximum, sum, output
};

}  // namespace baton
