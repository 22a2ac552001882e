// A model's weights, packed, and the memory that its steps compute in.
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
    Number number;  // in which products are computed
    Arena arena;
    const Kernels& kernels;
    Team team;
    std::vector<Layer> layers;
    std::vector<Mlps> mlps;  // of each layer
    const float* final_norm = nullptr;
    Linear head;
    Linear embedding;  // the head's panels where the two are tied
    Slabs weights;
};

// How one matrix is to be packed: `rows` of `inputs` numbers each.
// interleaved: the first half of the rows is a gate, the second half what it gates; panels take 16 of each. Their number
// is even: so every input of the product that follows is written, those too that only fill up to INPUTS_ALIGN.
struct Matrix {
    const void* data;
    const float* bias;
    int rows, inputs;
    bool interleaved;

    int outputs() const { return interleaved ? padded(rows / 2, PANEL) * 2 : rows; }
};

// A quantized one: shape.data is a byte per number (its code), scales are per run of 32 (float16) or per row (float32).
struct QuantMatrix {
    Matrix shape;
    Number number;
    const void* scales;
    const uint16_t* minimums;  // float16 per run, or null
};

Linear pack(Model& model, const Matrix& matrix, Number number);
Linear pack_quant(Model& model, const QuantMatrix& matrix);
const float* pack_bias(Model& model, const Matrix& matrix, int panels);
int row_at(const Matrix& matrix, int place);  // the row that stands at a place of the panels; -1: padding
const float* keep(Model& model, const float* values, int count);

}  // namespace baton
