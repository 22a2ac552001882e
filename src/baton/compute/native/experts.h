// The MLPs of a layer, and the assignment of tokens to experts: pure functions from scores to lists of rows.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

// down(silu(gate) * up).
struct Mlp {
    Linear gate_up, down;
};

// The MLPs of a layer: one MLP; or experts, of which a router chooses `used` for each token, followed by the shared MLP
// (if there is one), which computes every token.
struct Mlps {
    std::vector<Mlp> all;
    Linear router;  // float32, to a score per expert, and to the gate of the shared MLP if it has one
    int experts = 0, used = 0;
    bool sigmoid = false;     // probabilities are sigmoids of scores, not a softmax
    bool normalized = false;  // the weights of a token's experts are divided by their sum
    float scale = 1.0f;       // factor on the weights after normalization
    int groups = 1, groups_used = 1;    // a token's experts come from its `groups_used` best groups, of equal size
    int group_best = 1;                 // a group's score is the sum of its best 1 or 2 experts
    const float* choice_bias = nullptr;  // [experts], added to probabilities for the choice only; or null

    bool routed() const { return experts > 0; }
    bool shared() const { return routed() && all.size() > size_t(experts); }
    int choices() const { return used + (shared() ? 1 : 0); }  // MLPs whose results are summed for a token
};

// Rows [first, first + count) of one expert that are multiplied together.
struct Portion {
    int expert, first, count;
};

// The assignment of a step's tokens to the experts of one layer. Each pair of a token and an expert has a place. Places
// are sorted by expert, then by token; the places of the shared MLP come last, in the order of tokens.
struct Deal {
    std::vector<float> choice;    // [rows][experts]: scores for the choice; -infinity: excluded
    std::vector<float> groups;    // [rows][groups]: their scores
    std::vector<int32_t> chosen;  // [rows][used]: experts, the most probable first
    std::vector<float> weights;   // [rows][choices]
    std::vector<int32_t> places;  // [rows][choices]
    std::vector<int32_t> rows;    // [rows * used]: the token of each place
    std::vector<int32_t> next;    // [experts + 1]: the next free place of each expert
    std::vector<Portion> portions;

    // Allocate memory for a step, so that the functions below do not allocate.
    void reserve(const Mlps& mlps, int rows, int portion_rows);
    const Portion* portion(int index) const {
        return size_t(index) < portions.size() ? &portions[size_t(index)] : nullptr;
    }
};

// The maximum number of portions of this many rows, for any choice of experts.
int portions_max(const Mlps& mlps, int rows, int portion_rows);

// Choose a row's experts from its scores [experts], which become probabilities. Of equals, the first is chosen.
// Sources: Mixtral (arXiv 2401.04088), section 2.1; groups: DeepSeek-V2 (2405.04434) and V3 (2412.19437, 2.1.2,
// with sigmoid and bias); the gate of a shared MLP: the model code of Qwen1.5-MoE.
void choose(const Mlps& mlps, float* scores, int row, Deal& deal);

// Assign places to all rows, and divide the rows of each expert into portions of at most `portion_rows`.
void deal_out(const Mlps& mlps, int rows, int portion_rows, Deal& deal);

}  // namespace baton
