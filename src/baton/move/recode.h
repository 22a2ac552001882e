// Convert strided runs of cells from one KV format to another, compiled for one instruction set: see recode.cpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kv_formats.h"
#include "recode_call.h"

namespace baton {
namespace {

constexpr int64_t NUMBERS = 4096;  // converted at a time: their floats stay in the first-level cache
constexpr int DIM_MAX = 4096;

using Decode = void (*)(const uint8_t*, float*, int64_t, int);
using Encode = void (*)(uint8_t*, const float*, int64_t, int);

void decode_f32(const uint8_t* in, float* out, int64_t cells, int dim) {
    std::memcpy(out, in, size_t(cells * dim) * 4);
}

void decode_bf16(const uint8_t* in, float* out, int64_t cells, int dim) {
    for (int64_t i = 0; i < cells * dim; i++) {
        uint16_t half;
        std::memcpy(&half, in + 2 * i, 2);
        out[i] = float_of(uint32_t(half) << 16);
    }
}

void decode_f16(const uint8_t* in, float* out, int64_t cells, int dim) {
    for (int64_t i = 0; i < cells * dim; i++) {
        uint16_t half;
        std::memcpy(&half, in + 2 * i, 2);
        const uint32_t size = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
        const uint32_t wide = (size << 13) + (size >= 0x7c00 ? 0x70000000u : 0x38000000u);
        const uint32_t small = bits_of(float(int32_t(size)) * 5.9604645e-8f);  // 2^-24
        out[i] = float_of((size < 0x400 ? small : wide) | sign);
    }
}

void decode_int8(const uint8_t* in, float* out, int64_t cells, int dim) {
    for (int64_t cell = 0; cell < cells; cell++, in += dim + 4, out += dim) {
        float scale;
        std::memcpy(&scale, in + dim, 4);
        for (int i = 0; i < dim; i++) out[i] = float(int8_t(in[i])) * scale;
    }
}

void decode_fp8(const uint8_t* in, float* out, int64_t cells, int dim) {
    for (int64_t cell = 0; cell < cells; cell++, in += dim + 4, out += dim) {
        float scale;
        std::memcpy(&scale, in + dim, 4);
        scale *= 256.0f;  // engines read a code as a float16, whose exponent has another bias
        for (int i = 0; i < dim; i++) {
            const uint32_t size = in[i] & 0x7f, sign = uint32_t(in[i] & 0x80) << 24;
            const uint32_t small = bits_of(float(int32_t(size)) * 7.62939453125e-6f);  // 2^-17
            const uint32_t wide = (size << 20) + 0x38000000u;
            out[i] = float_of((size < 8 ? small : wide) | sign) * scale;
        }
    }
}

void decode_fp4(const uint8_t* in, float* out, int64_t cells, int dim) {
    const int64_t size = cell_bytes(KVFormat::FP4, dim);
    for (int64_t cell = 0; cell < cells; cell++) load_fp4(in + cell * size, out + cell * dim, dim);
}

void decode_mxfp4(const uint8_t* in, float* out, int64_t cells, int dim) {
    const int64_t size = cell_bytes(KVFormat::MXFP4, dim);
    for (int64_t cell = 0; cell < cells; cell++) load_mxfp4(in + cell * size, out + cell * dim, dim);
}

void encode_f32(uint8_t* out, const float* in, int64_t cells, int dim) {
    std::memcpy(out, in, size_t(cells * dim) * 4);
}

void encode_bf16(uint8_t* out, const float* in, int64_t cells, int dim) {
    for (int64_t i = 0; i < cells * dim; i++) {
        const uint32_t bits = bits_of(in[i]), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const uint16_t half = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
        std::memcpy(out + 2 * i, &half, 2);
    }
}

void encode_f16(uint8_t* out, const float* in, int64_t cells, int dim) {
    for (int64_t i = 0; i < cells * dim; i++) {
        const uint32_t bits = bits_of(in[i]), size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
        const uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000;  // 2^-24 is the last bit of 0.5's sum
        const uint32_t normal = (size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13;
        const uint32_t nan = std::max(0x7c01u, 0x7c00u | ((size >> 13) & 0x3ff));
        const uint32_t large = size > 0x7f800000 ? nan : 0x7c00u;
        const uint32_t code = size < 0x38800000 ? small : size >= 0x477ff000 ? large : normal;
        const uint16_t half = uint16_t(code | sign);
        std::memcpy(out + 2 * i, &half, 2);
    }
}

void encode_int8(uint8_t* out, const float* in, int64_t cells, int dim) {
    for (int64_t cell = 0; cell < cells; cell++) store_8_bits<true>(out + cell * (dim + 4), in + cell * dim, dim);
}

void encode_fp8(uint8_t* out, const float* in, int64_t cells, int dim) {
    for (int64_t cell = 0; cell < cells; cell++) store_8_bits<false>(out + cell * (dim + 4), in + cell * dim, dim);
}

void encode_fp4(uint8_t* out, const float* in, int64_t cells, int dim) {
    const int64_t size = cell_bytes(KVFormat::FP4, dim);
    for (int64_t cell = 0; cell < cells; cell++) store_fp4(out + cell * size, in + cell * dim, dim);
}

void encode_mxfp4(uint8_t* out, const float* in, int64_t cells, int dim) {
    const int64_t size = cell_bytes(KVFormat::MXFP4, dim);
    for (int64_t cell = 0; cell < cells; cell++) store_mxfp4(out + cell * size, in + cell * dim, dim);
}

Decode decoder(KVFormat format) {
    switch (format) {
        case KVFormat::F32: return decode_f32;
        case KVFormat::BF16: return decode_bf16;
        case KVFormat::F16: return decode_f16;
        case KVFormat::I8: return decode_int8;
        case KVFormat::E4M3: return decode_fp8;
        case KVFormat::FP4: return decode_fp4;
        default: return decode_mxfp4;
    }
}

Encode encoder(KVFormat format) {
    switch (format) {
        case KVFormat::F32: return encode_f32;
        case KVFormat::BF16: return encode_bf16;
        case KVFormat::F16: return encode_f16;
        case KVFormat::I8: return encode_int8;
        case KVFormat::E4M3: return encode_fp8;
        case KVFormat::FP4: return encode_fp4;
        default: return encode_mxfp4;
    }
}

// Convert as `baton_recode` says.
inline int recode(const RecodeCall& call) {
    if (call.dim < 1 || call.dim > DIM_MAX) return -1;
    const auto source = KVFormat(call.source_format), target = KVFormat(call.target_format);
    const Decode decode = decoder(source);
    const Encode encode = encoder(target);
    const int64_t loops = call.geometry[0], cells = call.geometry[1], *loop = call.geometry + 2;
    const int64_t source_bytes = cell_bytes(source, call.dim), target_bytes = cell_bytes(target, call.dim);
    const int64_t portion = std::max<int64_t>(1, NUMBERS / call.dim);
    alignas(64) float numbers[NUMBERS];
    int64_t total = 1;
    for (int64_t i = 0; i < loops; i++) total *= loop[3 * i];
    for (int64_t run = 0; run < total; run++) {
        const uint8_t* in = call.from;
        uint8_t* out = call.to;
        for (int64_t i = loops - 1, left = run; i >= 0; left /= loop[3 * i], i--) {
            in += left % loop[3 * i] * loop[3 * i + 1];
            out += left % loop[3 * i] * loop[3 * i + 2];
        }
        for (int64_t cell = 0; cell < cells; cell += portion) {
            const int64_t count = std::min(portion, cells - cell);
            decode(in + cell * source_bytes, numbers, count, call.dim);
            encode(out + cell * target_bytes, numbers, count, call.dim);
        }
    }
    return 0;
}

}  // namespace
}  // namespace baton
