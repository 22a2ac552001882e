// The nouns that all parts of the native engine share: numbers, weights, a model, and one step's ragged batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace baton {

using bf16 = uint16_t;  // the upper half of a float32

// What numbers are stored as. I8 to Q4M are weights only, see quant.h; the last two KV only, see kv_cells.h.
enum class Number : int32_t { F32 = 0, BF16 = 1, I8 = 2, Q8 = 3, Q4 = 4, Q4M = 5, KV_I8 = 6, KV_E4M3 = 7 };

constexpr bool is_quantized(Number number) { return number >= Number::I8 && number <= Number::Q4M; }

// Bytes of one head's keys (or values) of one token.
constexpr int64_t kv_head_bytes(Number number, int head_dim) {
    return number == Number::F32 ? head_dim * 4 : number == Number::BF16 ? head_dim * 2 : head_dim + 4;
}

// Weights stand in panels of 32 outputs, the same for every instruction set:
// float32 as [panel][input][32], bfloat16 as [panel][input / 2][32][2] (pairs of inputs, as dot instructions want).
constexpr int PANEL = 32;
constexpr int INPUTS_ALIGN = 32;  // inputs are padded with zeros to a multiple of this: one AMX tile of bfloat16
// Keys are attended to in tiles that start at multiples of TILE_KEYS, summed up in splits that start at multiples of
// SPLIT_KEYS. Both are fixed, so that how a sum is cut depends on positions alone: never on batch, chunk or threads.
constexpr int TILE_KEYS = 64;
constexpr int SPLIT_KEYS = 256;
constexpr float NOTHING_SEEN = -1e30f;  // the maximum of no scores; finite, so that differences of it are

constexpr int padded(int count, int align) { return (count + align - 1) / align * align; }

struct Linear {
    const void* panels = nullptr;
    const float* bias = nullptr;  // [panels * 32] in the panels' order, or null
    Number number = Number::F32;
    Number rows_number = Number::F32;  // what rows come in; quantized weights have them rounded before the product
    int outputs = 0;  // without padding
    int inputs = 0;   // with padding

    int panel_count() const { return (outputs + PANEL - 1) / PANEL; }
};

struct Layer {
    const float* input_norm = nullptr;  // [hidden]
    const float* mlp_norm = nullptr;
    const float* q_norm = nullptr;  // [head_dim], or null
    const float* k_norm = nullptr;
    Linear qkv, o;
    int window = 0;  // tokens back that a token sees, its own included; 0: all
};

struct Sizes {
    int layers, hidden, heads, kv_heads, head_dim, vocab;
    float rms_eps;

    int group() const { return heads / kv_heads; }
    int head_pad() const { return padded(head_dim, INPUTS_ALIGN); }
};

// KV blocks as the arena holds them: [block][layers][2 (K, V)][block_tokens][kv_heads][head_dim].
struct Arena {
    uint8_t* bytes = nullptr;
    int64_t blocks = 0;
    int block_tokens = 0;
    int layers = 0;
    int64_t token_bytes = 0;  // of one token's keys (or values) in one layer
    Number number = Number::F32;

    uint8_t* row(int32_t block, int layer, int plane, int slot) const {
        const int64_t planes = (int64_t{block} * layers + layer) * 2 + plane;
        return bytes + (planes * block_tokens + slot) * token_bytes;
    }
};

// One request's part of a step: its tokens are rows [first, first + count), at positions from `start`.
struct Slice {
    int first, count, start;
    const int32_t* blocks;
};

// Rows of activations in the precision that products are computed in. `stride` counts numbers.
struct Rows {
    void* data;
    int64_t stride;
};

// Queries [query, query + count) of a slice, heads [head, head_end) of its KV heads, splits [split, split_end).
struct AttentionItem {
    int slice, query, count;
    int head, head_end;
    int split, split_end;
    int part;  // index among its query's parts where the splits are shared out; else WHOLE
};
constexpr int WHOLE = -1;

// Queries of one layer: [kv_head][token][group][head_pad], so that the heads that share keys stand together.
struct Queries {
    void* data;
    Number number;
    int tokens;

    int64_t at(const Sizes& sizes, int kv_head, int token) const {
        return (int64_t{kv_head} * tokens + token) * sizes.group() * sizes.head_pad();
    }
};

// What all attention items of one layer share.
struct Attention {
    const Sizes* sizes;
    const Arena* arena;
    const Slice* slices;
    int layer;
    int window;
    float scale;
    Queries queries;
    Rows out;      // [token][heads * head_dim]
    Number out_number;
    float* parts;  // [part][2 + head_pad]: maximum, sum, output
};

}  // namespace baton
