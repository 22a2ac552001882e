// Mixture of experts: the MLPs of a layer, and the routing of tokens to experts as pure functions from router scores to
// the row lists of a grouped GEMM.
#pragma once
#include <vector>

#include "types.h"

namespace baton {

// down(silu(gate) * up).
struct Mlp {
    Linear gate_up, down;
};

// The MLPs of a layer: one dense MLP; or experts, of which a router chooses `experts_per_token` for each token,
// followed by the shared expert (if there is one), which computes every token.
struct Mlps {
    std::vector<Mlp> all;
    Linear router;  // float32: one score per expert, then the gate of the shared expert if it has one
    int experts = 0, experts_per_token = 0;
    bool sigmoid = false;     // probabilities are sigmoids of scores, not a softmax
    bool normalized = false;  // the weights of a token's experts are divided by their sum
    float scale = 1.0f;       // factor on the weights after normalization
    int groups = 1, groups_used = 1;    // a token's experts come from its `groups_used` best groups, of equal size
    int group_best = 1;                 // a group's score is the sum of its best 1 or 2 experts
    const float* choice_bias = nullptr;  // [experts], added to probabilities for the choice only; or null

    bool routed() const { return experts > 0; }
    bool shared() const { return routed() && all.size() > size_t(experts); }
    // MLPs whose results are summed for a token
    int mlps_per_token() const { return experts_per_token + (shared() ? 1 : 0); }
};

// Rows [first, first + count) of one expert in the grouped GEMM, multiplied together.
struct RowBlock {
    int expert, first, count;
};

// The assignment of a step's tokens to the experts of one layer. Each pair of a token and an expert has a place: its
// row in the grouped GEMM. Places are sorted by expert, then by token; those of the shared expert come last, by token.
struct ExpertAssignment {
    std::vector<float> choice;    // [rows][experts]: scores for the choice; -infinity: excluded
    std::vector<float> groups;    // [rows][groups]: their scores
    std::vector<int32_t> chosen;  // [rows][experts_per_token]: experts, the most probable first
    std::vector<float> weights;   // [rows][mlps_per_token]
    std::vector<int32_t> places;  // [rows][mlps_per_token]
    std::vector<int32_t> rows;    // [rows * experts_per_token]: the token of each place
    std::vector<int32_t> next;    // [experts + 1]: the next free place of each expert
    std::vector<RowBlock> row_blocks;

    // Allocate memory for a step, so that the functions below do not allocate.
    void reserve(const Mlps& mlps, int rows, int block_rows);
    const RowBlock* row_block(int index) const {
        return size_t(index) < row_blocks.size() ? &row_blocks[size_t(index)] : nullptr;
    }
};

// Return the maximum number of row blocks for this many tokens, whichever experts are chosen.
int row_blocks_max(const Mlps& mlps, int rows, int block_rows);

// Choose a row's experts from its scores [experts], which become probabilities. Ties go to the lower index.
// Sources: Mixtral (arXiv 2401.04088), section 2.1; groups: DeepSeek-V2 (2405.04434) and V3 (2412.19437, 2.1.2,
// with sigmoid and bias); the gate of a shared MLP: the model code of Qwen1.5-MoE.
void choose_experts(const Mlps& mlps, float* scores, int row, ExpertAssignment& assignment);

// Assign a place to every pair, and divide the rows of each expert into row blocks of at most `block_rows`.
void assign_rows(const Mlps& mlps, int rows, int block_rows, ExpertAssignment& assignment);

}  // namespace baton
