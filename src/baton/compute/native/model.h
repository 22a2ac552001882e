// A model's packed weights, and the memory of its steps.
#pragma once
#include <vector>

#include "experts.h"
#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"
#include "types.h"

namespace baton {

struct Model {
    Model(const Sizes& sizes, DType dtype, const Arena& arena, const Kernels& kernels, const ThreadPlacement& placement)
        : sizes(sizes), dtype(dtype), arena(arena), kernels(kernels), thread_pool(placement),
          layers(size_t(sizes.layers)), mlps(size_t(sizes.layers)) {}

    int64_t element_bytes() const { return dtype == DType::BF16 ? 2 : 4; }

    Sizes sizes;
    DType dtype;  // the type of activations in a GEMM
    Arena arena;
    const Kernels& kernels;
    ThreadPool thread_pool;
    std::vector<Layer> layers;
    std::vector<Mlps> mlps;  // one per layer
    const float* final_norm = nullptr;
    Linear head;
    Linear embedding;  // the panels of the output projection if the two are tied
    SlabAllocator weights;
};

// A matrix [rows][inputs] to pack into panels.
// interleaved: the first half of the rows is the gate, the second half the up projection; a panel has 16 rows of each.
// The number of panels is even, so that every input of the next GEMM is written, including the padding.
struct Matrix {
    const void* data;
    const float* bias;
    int rows, inputs;
    bool interleaved;

    int outputs() const { return interleaved ? padded(rows / 2, PANEL) * 2 : rows; }
};

// A quantized matrix: shape.data has a byte (code) per number; scales are per group of 32 (float16)
// or per row (float32).
struct QuantMatrix {
    Matrix shape;
    DType dtype;
    const void* scales;
    const uint16_t* minimums;  // float16 per group, or null
};

Linear pack(Model& model, const Matrix& matrix, DType dtype);
Linear pack_quant(Model& model, const QuantMatrix& matrix);
const float* pack_bias(Model& model, const Matrix& matrix, int panels);
int source_row(const Matrix& matrix, int panel_row);  // the row that is packed as this row of the panels; -1: padding
const float* copy_values(Model& model, const float* values, int count);

}  // namespace baton
