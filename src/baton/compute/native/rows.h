// Kernels for single rows, between GEMMs: embedding, RMSNorm, RoPE, and the write to KV blocks.
#pragma once
#include "kv_dtype.h"

namespace baton {
namespace {

template <class Element>
inline void store_row(Element* out, const float* row, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(row + i));
    for (; i < count; i++) {
        if constexpr (sizeof(Element) == 2) out[i] = to_bf16(row[i]);
        else out[i] = row[i];
    }
}

inline void store_row(DType dtype, void* out, int64_t at, const float* row, int count) {
    if (dtype == DType::BF16) store_row(static_cast<bf16*>(out) + at, row, count);
    else store_row(static_cast<float*>(out) + at, row, count);
}

// Write one head's keys or values to the arena, in the KV type.
inline void write_kv_head(DType dtype, uint8_t* out, const float* row, int dim) {
    if (dtype == DType::F32 || dtype == DType::BF16) store_row(dtype, out, 0, row, dim);
    else store_kv_head(dtype, out, row, dim);
}

inline float sum_of_squares(const float* row, int count) {
    Vec squares = zero();
    int i = 0;
    for (; i + LANES <= count; i += LANES) squares = fma(load(row + i), load(row + i), squares);
    float total = reduce_sum(squares);
    for (; i < count; i++) total += row[i] * row[i];
    return total;
}

// RMSNorm. out may be row.
inline void rms_norm(const float* row, const float* weight, float* out, int count, float eps) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(row, count) / float(count) + eps);
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, mul(mul(load(row + i), broadcast(factor)), load(weight + i)));
    for (; i < count; i++) out[i] = row[i] * factor * weight[i];
}

// RMSNorm of the first `hidden` numbers of rows [first, first + count) of x [tokens][stride], written as `dtype`.
void rms_norm_rows(const float* x, int64_t stride, int hidden, const float* weight, float eps, int first, int count,
                   DType dtype, Rows out) {
    for (int row = first; row < first + count; row++) {
        float piece[1024];
        const float* in = x + row * stride;
        const float factor = 1.0f / std::sqrt(sum_of_squares(in, hidden) / float(hidden) + eps);
        for (int from = 0; from < hidden; from += 1024) {
            const int size = hidden - from < 1024 ? hidden - from : 1024;
            int i = 0;
            for (; i + LANES <= size; i += LANES)
                store(piece + i, mul(mul(load(in + from + i), broadcast(factor)), load(weight + from + i)));
            for (; i < size; i++) piece[i] = in[from + i] * factor * weight[from + i];
            store_row(dtype, out.data, row * out.stride + from, piece, size);
        }
    }
}

// x [hidden] += the sum of weights[i] * results[places[i]] [hidden], in this order.
void add_weighted_rows(float* x, int hidden, const float* results, const int32_t* places, const float* weights,
                       int count) {
    int i = 0;
    for (; i + LANES <= hidden; i += LANES) {
        Vec total = zero();
        for (int k = 0; k < count; k++)
            total = fma(broadcast(weights[k]), load(results + int64_t{places[k]} * hidden + i), total);
        store(x + i, add(load(x + i), total));
    }
    for (; i < hidden; i++) {
        float total = 0;
        for (int k = 0; k < count; k++) total += weights[k] * results[int64_t{places[k]} * hidden + i];
        x[i] += total;
    }
}

// Write one row of a linear layer's weights as floats: the embedding of a token if it is tied to the output projection.
void unpack_weight_row(const Linear& w, int output, float* out, int count) {
    if (is_quantized(w.dtype))
        return with_format(w.dtype, [&](auto format) { unpack_quant_row<decltype(format)>(w, output, out, count); });
    const int64_t panel = int64_t{output / PANEL} * PANEL * w.inputs;
    const int lane = output % PANEL;
    if (w.dtype == DType::F32) {
        const float* elements = static_cast<const float*>(w.panels) + panel + lane;
        for (int k = 0; k < count; k++) out[k] = elements[int64_t{k} * PANEL];
        return;
    }
    const bf16* elements = static_cast<const bf16*>(w.panels) + panel + lane * 2;
    for (int k = 0; k < count; k++) out[k] = from_bf16(elements[int64_t{k / 2} * PANEL * 2 + k % 2]);
}

// Apply RoPE to a head. angles: [head_dim], cosines and then sines. Dimension i pairs with i + head_dim / 2.
inline void apply_rope(float* head, const float* angles, int head_dim) {
    const int half = head_dim / 2;
    float *low = head, *high = head + half;
    const float *cosine = angles, *sine = angles + half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Vec a = load(low + i), b = load(high + i), c = load(cosine + i), s = load(sine + i);
        store(low + i, sub(mul(a, c), mul(b, s)));
        store(high + i, fma(a, s, mul(b, c)));
    }
    for (; i < half; i++) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

// Apply RoPE to one token's queries and keys, store the queries, and write keys and values to their slot in a KV block.
void rope_and_write_kv(const Sizes& sizes, const Layer& layer, float* qkv, const float* angles, int token,
                       Queries queries, DType kv_dtype, uint8_t* keys, uint8_t* values) {
    const int dim = sizes.head_dim, group = sizes.group();
    const int64_t head_bytes = kv_head_bytes(kv_dtype, dim);
    for (int head = 0; head < sizes.heads; head++) {
        float* q = qkv + head * dim;
        if (layer.q_norm != nullptr) rms_norm(q, layer.q_norm, q, dim, sizes.rms_eps);
        apply_rope(q, angles, dim);
        const int64_t at = queries.at(sizes, head / group, token) + int64_t{head % group} * sizes.head_pad();
        store_row(queries.dtype, queries.data, at, q, dim);
    }
    for (int head = 0; head < sizes.kv_heads; head++) {
        float* k = qkv + (sizes.heads + head) * dim;
        if (layer.k_norm != nullptr) rms_norm(k, layer.k_norm, k, dim, sizes.rms_eps);
        apply_rope(k, angles, dim);
        write_kv_head(kv_dtype, keys + head * head_bytes, k, dim);
        write_kv_head(kv_dtype, values + head * head_bytes, qkv + (sizes.heads + sizes.kv_heads + head) * dim, dim);
    }
}

}  // namespace
}  // namespace baton
