// A model's packed weights, and the memory of its steps.
#pragma once
#include <vector>

#include "experts.h"
#include "kernels.h"
#include "memory.h"
#include "team.h"
#include "types.h"

namespace baton {

struct Model {
    Model(const Sizes& sizes, Number number, const Arena& arena, const Kernels& kernels, const Places& places)
        : sizes(sizes), number(number), arena(arena), kernels(kernels), team(places),
          layers(size_t(sizes.layers)), mlps(size_t(sizes.layers)) {}

    int64_t cell_bytes() const { return number == Number::BF16 ? 2 : 4; }

    Sizes sizes;
    Number number;  // the type of products
    Arena arena;
    const Kernels& kernels;
    Team team;
    std::vector<Layer> layers;
    std::vector<Mlps> mlps;  // one per layer
    const float* final_norm = nullptr;
    Linear head;
    Linear embedding;  // the panels of the output projection if the two are tied
    Slabs weights;
};

// How to pack one matrix of `rows` of `inputs` numbers.
// interleaved: the first half of the rows is the gate, the second half the up projection; a panel has 16 rows of each.
// The number of panels is even, so that every input of the next product is written, including the padding.
struct Matrix {
    const void* data;
    const float* bias;
    int rows, inputs;
    bool interleaved;

    int outputs() const { return interleaved ? padded(rows / 2, PANEL) * 2 : rows; }
};

// A quantized matrix: shape.data has a byte (code) per number; scales are per run of 32 (float16) or per row (float32).
struct QuantMatrix {
    Matrix shape;
    Number number;
    const void* scales;
    const uint16_t* minimums;  // float16 per run, or null
};

Linear pack(Model& model, const Matrix& matrix, Number number);
Linear pack_quant(Model& model, const QuantMatrix& matrix);
const float* pack_bias(Model& model, const Matrix& matrix, int panels);
int row_at(const Matrix& matrix, int place);  // the row at this place of the panels; -1: padding
const float* keep(Model& model, const float* values, int count);

}  // namespace baton
