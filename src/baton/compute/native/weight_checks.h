// Checks of the sizes that steps rely on: a model, and its weights before they are read. Each returns an error message,
// or an empty string.
#pragma once
#include <algorithm>
#include <climits>
#include <initializer_list>
#include <string>

#include "api.h"
#include "model.h"

namespace baton {

inline std::string mismatch(const char* what, int64_t value, const char* where, int64_t bound) {
    return what + std::to_string(value) + where + std::to_string(bound);
}

// Return a message unless every value is at least 0 and below `end`.
inline std::string check_below(const int32_t* values, int32_t count, int64_t end, const char* what, const char* where) {
    for (int32_t i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= end) return mismatch(what, values[i], where, end);
    return "";
}

// Check that a number of a model is in [low, high].
inline std::string check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return "";
    return std::string(name) + " is " + std::to_string(value) + ", and has to be from " + std::to_string(low) + " to " +
           std::to_string(high);
}

// Return the first message that is not empty.
inline std::string first_problem(std::initializer_list<std::string> problems) {
    for (const std::string& problem : problems)
        if (!problem.empty()) return problem;
    return "";
}

inline std::string check_pointer(const char* name, const void* data) {
    return data != nullptr ? "" : std::string(name) + " is missing";
}

// Check the shape and the type of a matrix before it is read. Quantized matrices are padded to whole groups of inputs.
inline std::string check_matrix(const char* name, const BatonMatrix& m, int64_t rows, int64_t inputs) {
    const DType dtype = DType(m.dtype);
    const bool quantized = is_quantized(dtype);
    if (!quantized && dtype != DType::F32 && dtype != DType::BF16)
        return std::string(name) + " has the unknown type " + std::to_string(m.dtype);
    const int64_t stored_inputs = quantized ? padded(int(inputs), INPUTS_ALIGN) : inputs;
    if (m.rows != rows || m.inputs != stored_inputs)
        return std::string(name) + " is [" + std::to_string(m.rows) + ", " + std::to_string(m.inputs) +
               "], and has to be [" + std::to_string(rows) + ", " + std::to_string(stored_inputs) + "]";
    if (quantized && (m.scales == nullptr || (dtype == DType::Q4M && m.minimums == nullptr)))
        return std::string(name) + " has no scales or minimums";
    return check_pointer(name, m.data);
}

inline std::string check_dense(const char* name, const BatonMatrix& m, int64_t rows, int64_t inputs) {
    if (is_quantized(DType(m.dtype))) return std::string(name) + " is quantized, and has to be dense";
    return check_matrix(name, m, rows, inputs);
}

// Check a model's sizes. The bounds are far above those of any model, and keep products of two sizes below 2^31.
inline std::string check(const BatonModel& m) {
    const BatonLatentSizes& l = m.latent;
    const bool latent = l.kv_rank != 0;
    std::string problem = first_problem({
        check_range("layers", m.layers, 1, 1 << 12),
        check_range("hidden", m.hidden, 1, 1 << 20),
        check_range("heads", m.heads, 1, 1 << 14),
        check_range("kv_heads", m.kv_heads, 1, 1 << 14),
        check_range("head_dim", m.head_dim, 1, HEAD_DIM_MAX),
        check_range("vocab", m.vocab, 1, 1 << 24),
        check_range("dtype", m.dtype, int(DType::F32), int(DType::BF16)),
        check_range("block_tokens", m.block_tokens, 1, 1 << 20),
        check_range("threads", m.threads, 1, 1 << 12),
        check_range("q_rank", l.q_rank, 0, latent ? 1 << 16 : 0),
        check_range("kv_rank", l.kv_rank, 0, HEAD_DIM_MAX),
        check_range("rope_dim", l.rope_dim, latent ? 2 : 0, latent ? HEAD_DIM_MAX : 0),
        check_range("nope_dim", l.nope_dim, latent ? 1 : 0, latent ? 1 << 14 : 0),
        check_range("value_dim", l.value_dim, latent ? 1 : 0, latent ? 1 << 14 : 0),
    });
    if (!problem.empty()) return problem;
    const DType kv_dtype = DType(m.kv_dtype);
    const bool is_float = kv_dtype == DType::F32 || kv_dtype == DType::BF16;
    if (!is_float && (kv_dtype < DType::KV_I8 || kv_dtype > DType::KV_MXFP4))
        return mismatch("kv_dtype is ", m.kv_dtype, ", which is no type of KV, products have the type ", m.dtype);
    const int group = kv_dtype == DType::KV_FP4 ? FP4_GROUP : kv_dtype == DType::KV_MXFP4 ? MXFP4_GROUP : 1;
    if (m.head_dim % group != 0)
        return mismatch("4-bit KV has one scale per ", group, " numbers, and no whole groups in heads of ", m.head_dim);
    if (m.heads % m.kv_heads != 0)
        return mismatch("heads is ", m.heads, ", which is no multiple of kv_heads ", m.kv_heads);
    const int rotary_dim = latent ? l.rope_dim : m.head_dim;
    if (rotary_dim % 2 != 0)
        return mismatch("RoPE rotates pairs, not ", rotary_dim, " dimensions of a head of ", m.head_dim);
    if (latent && (m.kv_heads != 1 || l.kv_rank + l.rope_dim != m.head_dim))
        return mismatch("latents of ", l.kv_rank + l.rope_dim, " numbers are one KV head, head_dim is ", m.head_dim);
    return "";
}

inline std::string check(const Sizes& s, const BatonLayer& layer) {
    const LatentSizes& l = s.latent;
    const int64_t queries = int64_t{s.heads} * (s.is_latent() ? l.query_dim() : s.head_dim);
    const int64_t cached = int64_t{s.kv_heads} * s.head_dim;
    const int64_t outputs = (l.q_rank > 0 ? l.q_rank : queries) + (s.is_latent() ? cached : 2 * cached);
    const int64_t attended = int64_t{s.heads} * (s.is_latent() ? l.value_dim : s.head_dim);
    return first_problem({check_pointer("input_norm", layer.input_norm), check_pointer("mlp_norm", layer.mlp_norm),
                          check_matrix("qkv", layer.qkv, outputs, s.hidden),
                          check_matrix("o", layer.o, s.hidden, attended),
                          check_range("window", layer.window, 0, INT32_MAX)});
}

inline std::string check(const Sizes& s, const BatonLatent& latent) {
    const LatentSizes& l = s.latent;
    if (!s.is_latent()) return "the model has no latent attention";
    std::string problem =
        first_problem({check_pointer("kv_norm", latent.kv_norm),
                       check_dense("keys", latent.keys, int64_t{s.heads} * l.kv_rank, l.nope_dim),
                       check_dense("values", latent.values, int64_t{s.heads} * l.value_dim, l.kv_rank)});
    if (!problem.empty() || l.q_rank == 0) return problem;
    return first_problem({check_pointer("q_norm", latent.q_norm),
                          check_matrix("queries", latent.queries, int64_t{s.heads} * l.query_dim(), l.q_rank)});
}

// Check one MLP. All MLPs of a layer read the same activations, so all are quantized or none is.
inline std::string check(const Sizes& s, const BatonMlp& mlp, const Mlps& others) {
    const int64_t width = mlp.gate_up.rows / 2;
    const bool quantized = is_quantized(DType(mlp.gate_up.dtype));
    if (!others.all.empty() && quantized != is_quantized(others.all[0].gate_up.dtype))
        return "gate_up is quantized in some MLPs of a layer only";
    return first_problem({check_range("the width of an MLP", width, 1, 1 << 24),
                          check_matrix("gate_up", mlp.gate_up, 2 * width, s.hidden),
                          check_matrix("down", mlp.down, s.hidden, width)});
}

inline std::string check(const Sizes& s, const BatonRouter& router) {
    return first_problem({check_range("experts", router.experts, 1, 1 << 16),
                          check_range("scores", router.scores.rows, 1, int64_t{router.experts} + 1),
                          check_dense("scores", router.scores, router.scores.rows, s.hidden)});
}

// Check the number of MLPs of a layer, and the limits of its router.
inline std::string check(const Mlps& mlps) {
    const int found = int(mlps.all.size()), experts = mlps.experts, scores = mlps.router.outputs;
    if (!mlps.routed()) return found == 1 ? "" : "a layer without experts has " + std::to_string(found) + " MLPs";
    if (mlps.experts_per_token < 1 || mlps.experts_per_token > experts || found < experts || found > experts + 1 ||
        scores < experts || scores > found)
        return "a layer of " + std::to_string(experts) + " experts, " + std::to_string(mlps.experts_per_token) +
               " of them for each token, has " + std::to_string(found) + " MLPs and " + std::to_string(scores) +
               " scores";
    const Mlp& first = mlps.all[0];
    for (int expert = 1; expert < experts; expert++) {
        const Mlp& mlp = mlps.all[size_t(expert)];
        if (mlp.gate_up.outputs != first.gate_up.outputs ||
            is_quantized(mlp.down.dtype) != is_quantized(first.down.dtype))
            return mismatch("expert ", expert, " has another shape or type than the first of ", experts);
    }
    const int size = mlps.groups < 1 ? 0 : experts / mlps.groups;
    if (size * mlps.groups != experts || mlps.groups_used < 1 || mlps.groups_used > mlps.groups ||
        mlps.group_best < 1 || mlps.group_best > std::min(size, 2) || mlps.experts_per_token > size * mlps.groups_used)
        return std::to_string(mlps.experts_per_token) + " of " + std::to_string(experts) +
               " experts cannot come from " + std::to_string(mlps.groups_used) + " of " + std::to_string(mlps.groups) +
               " groups by the best " + std::to_string(mlps.group_best) + " of each";
    return "";
}

// Check that all weights of a layer were set.
inline std::string check(const Sizes& sizes, const Layer& layer) {
    if (layer.qkv.panels == nullptr) return "a layer has no attention";
    const size_t heads = sizes.is_latent() ? size_t(sizes.heads) : 0;
    if (layer.latent.keys.size() == heads) return "";
    return "a layer's attention has " + std::to_string(layer.latent.keys.size()) +
           " projections of latents; it should have " + std::to_string(heads);
}

}  // namespace baton
