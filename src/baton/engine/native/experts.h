// What a layer's tokens pass after attention.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

// silu(gate) * up, and down from there.
struct Mlp {
    Linear gate_up, down;
};

// A layer's MLPs: one, that every token passes.
struct Mlps {
    std::vector<Mlp> all;
};

}  // namespace baton
