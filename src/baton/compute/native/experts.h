// What a layer's tokens pass after attention, and how experts share them out. Pure: from scores to lists of rows.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

// silu(gate) * up, and down from there.
struct Mlp {
    Linear gate_up, down;
};

// A layer's MLPs: one that every token passes; or experts, of which a router chooses `used` for each token, and behind
// them, where there is one, the MLP that every token passes beside its experts.
struct Mlps {
    std::vector<Mlp> all;
    Linear router;  // float32, to a score per expert, and to the gate of the shared MLP where that has one
    int experts = 0, used = 0;
    bool sigmoid = false;     // scores become probabilities one by one, and not by softmax
    bool normalized = false;  // the weights of a token's experts are divided by their sum
    float scale = 1.0f;       // multiplies the weights after that
    int groups = 1, groups_used = 1;    // a token's experts come from so many groups of equal size, the best ones
    int group_best = 1;                 // what counts of a group: the sum of its best one, or two
    const float* choice_bias = nullptr;  // [experts], added to probabilities for the choice only; or null

    bool routed() const { return experts > 0; }
    bool shared() const { return routed() && all.size() > size_t(experts); }
    int choices() const { return used + (shared() ? 1 : 0); }  // MLPs whose results a token sums up
};

// Rows [first, first + count) of one expert, which are multiplied together.
struct Portion {
    int expert, first, count;
};

// A step's tokens dealt out to the experts of one layer. What a token and its choice make together has a place: first
// expert by expert, the tokens of each in order; then the shared MLP's, in the order of tokens.
struct Deal {
    std::vector<float> choice;    // [rows][experts]: what experts are chosen by; -infinity: not to be chosen
    std::vector<float> groups;    // [rows][groups]: their scores
    std::vector<int32_t> chosen;  // [rows][used]: experts, each token's likeliest first
    std::vector<float> weights;   // [rows][choices]
    std::vector<int32_t> places;  // [rows][choices]
    std::vector<int32_t> rows;    // [rows * used]: whose place it is
    std::vector<int32_t> next;    // [experts + 1]: first place of an expert that is not taken yet
    std::vector<Portion> portions;

    // Make room for a step, so that nothing below allocates.
    void reserve(const Mlps& mlps, int rows, int portion_rows);
    const Portion* portion(int index) const {
        return size_t(index) < portions.size() ? &portions[size_t(index)] : nullptr;
    }
};

// Most portions that so many rows can be cut into, whatever they choose.
int portions_max(const Mlps& mlps, int rows, int portion_rows);

// Choose a row's experts, the first of equals, from its scores [experts], which become probabilities.
// Sources: Mixtral (arXiv 2401.04088), section 2.1; groups are those of DeepSeek-V2 (2405.04434) and V3 (2412.19437,
// 2.1.2: sigmoid and bias as well); the gate of a shared MLP is that of Qwen1.5-MoE's model code.
void choose(const Mlps& mlps, float* scores, int row, Deal& deal);

// Give all rows that have chosen their places, and cut those of each expert into portions of at most `portion_rows`.
void deal_out(const Mlps& mlps, int rows, int portion_rows, Deal& deal);

}  // namespace baton
