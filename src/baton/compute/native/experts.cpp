#include "experts.h"

#include <algorithm>
#include <cmath>

namespace baton {
namespace {

constexpr float EXCLUDED = -INFINITY;     // below every probability, biased or not
constexpr float WEIGHT_SUM_MIN = 1e-20f;  // as in torch/layers/experts.py

int ceil_div(int rows, int block_rows) { return (rows + block_rows - 1) / block_rows; }

template <class T>
void grow(std::vector<T>& list, int count) {
    if (list.size() < size_t(count)) list.resize(size_t(count));
}

float sigmoid(float score) { return 1.0f / (1.0f + std::exp(-score)); }

void to_probabilities(const Mlps& mlps, float* scores) {
    float* const end = scores + mlps.experts;
    if (mlps.sigmoid) return void(std::transform(scores, end, scores, sigmoid));
    const float most = *std::max_element(scores, end);
    float total = 0;
    for (float* score = scores; score < end; score++) {
        *score = std::exp(*score - most);
        total += *score;
    }
    for (float* score = scores; score < end; score++) *score /= total;
}

// The sum of the best one or two scores of a group.
float group_score(const float* choice, int size, int best) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; i++) {
        if (choice[i] > first) second = first, first = choice[i];
        else if (choice[i] > second) second = choice[i];
    }
    return best == 1 ? first : first + second;
}

// Exclude the experts outside of a token's best groups. Ties go to the lower index.
void exclude_groups(const Mlps& mlps, float* choice, float* groups) {
    const int size = mlps.experts / mlps.groups;
    for (int group = 0; group < mlps.groups; group++)
        groups[group] = group_score(choice + group * size, size, mlps.group_best);
    for (int group = 0; group < mlps.groups; group++) {
        int better = 0;
        for (int other = 0; other < mlps.groups; other++)
            better += groups[other] > groups[group] || (groups[other] == groups[group] && other < group);
        if (better >= mlps.groups_used) std::fill_n(choice + group * size, size, EXCLUDED);
    }
}

}  // namespace

void ExpertAssignment::reserve(const Mlps& mlps, int step_rows, int block_rows) {
    grow(choice, step_rows * mlps.experts);
    grow(groups, step_rows * mlps.groups);
    grow(chosen, step_rows * mlps.experts_per_token);
    grow(weights, step_rows * mlps.mlps_per_token());
    grow(places, step_rows * mlps.mlps_per_token());
    grow(rows, step_rows * mlps.experts_per_token);
    grow(next, mlps.experts + 1);
    row_blocks.reserve(size_t(row_blocks_max(mlps, step_rows, block_rows)));
}

int row_blocks_max(const Mlps& mlps, int rows, int block_rows) {
    const int places = rows * mlps.experts_per_token, busy = std::min(mlps.experts, places);
    return busy + (places - busy) / block_rows;  // one per expert in use, then one per further block_rows rows
}

void choose_experts(const Mlps& mlps, float* scores, int row, ExpertAssignment& assignment) {
    float* const choice = &assignment.choice[size_t(row * mlps.experts)];
    int32_t* const chosen = &assignment.chosen[size_t(row * mlps.experts_per_token)];
    float* const weights = &assignment.weights[size_t(row * mlps.mlps_per_token())];
    to_probabilities(mlps, scores);
    for (int expert = 0; expert < mlps.experts; expert++)
        choice[expert] = mlps.choice_bias == nullptr ? scores[expert] : scores[expert] + mlps.choice_bias[expert];
    if (mlps.groups_used < mlps.groups) exclude_groups(mlps, choice, &assignment.groups[size_t(row * mlps.groups)]);
    float weight_sum = 0;
    for (int i = 0; i < mlps.experts_per_token; i++) {
        float* const best = std::max_element(choice, choice + mlps.experts);  // ties: the lower index
        chosen[i] = int32_t(best - choice);
        weights[i] = scores[chosen[i]];
        weight_sum += weights[i];
        *best = EXCLUDED;
    }
    const float divisor = mlps.normalized ? weight_sum + WEIGHT_SUM_MIN : 1.0f;
    for (int i = 0; i < mlps.experts_per_token; i++) weights[i] = weights[i] / divisor * mlps.scale;
    if (!mlps.shared()) return;
    const bool gated = mlps.router.outputs > mlps.experts;
    weights[mlps.experts_per_token] = gated ? sigmoid(scores[mlps.experts]) : 1.0f;
}

void assign_rows(const Mlps& mlps, int rows, int block_rows, ExpertAssignment& assignment) {
    const int experts_per_token = mlps.experts_per_token, mlps_per_token = mlps.mlps_per_token();
    std::fill(assignment.next.begin(), assignment.next.end(), 0);
    for (int i = 0; i < rows * experts_per_token; i++) assignment.next[size_t(assignment.chosen[size_t(i)]) + 1]++;
    assignment.row_blocks.clear();
    for (int expert = 0; expert < mlps.experts; expert++) {
        const int first = assignment.next[size_t(expert)], count = assignment.next[size_t(expert) + 1];
        const int row_blocks = ceil_div(count, block_rows);
        for (int i = 0; i < row_blocks; i++) {
            const int from = int(int64_t{count} * i / row_blocks), to = int(int64_t{count} * (i + 1) / row_blocks);
            assignment.row_blocks.push_back({expert, first + from, to - from});
        }
        assignment.next[size_t(expert) + 1] += first;
    }
    for (int row = 0; row < rows; row++) {
        int32_t* const places = &assignment.places[size_t(row * mlps_per_token)];
        for (int choice = 0; choice < experts_per_token; choice++) {
            const int32_t place =
                assignment.next[size_t(assignment.chosen[size_t(row * experts_per_token + choice)])]++;
            places[choice] = place;
            assignment.rows[size_t(place)] = row;
        }
        if (mlps.shared()) places[experts_per_token] = rows * experts_per_token + row;
    }
}

}  // namespace baton
