#include "experts.h"

#include <algorithm>
#include <cmath>

namespace baton {
namespace {

constexpr float TAKEN = -INFINITY;        // below every probability, biased or not
constexpr float WEIGHT_SUM_MIN = 1e-20f;  // as in torch/layers/experts.py

int portions_of(int rows, int portion_rows) { return (rows + portion_rows - 1) / portion_rows; }

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

// Exclude the experts outside of a token's best groups. Of equal groups, the first is better.
void rule_out_groups(const Mlps& mlps, float* choice, float* groups) {
    const int size = mlps.experts / mlps.groups;
    for (int group = 0; group < mlps.groups; group++)
        groups[group] = group_score(choice + group * size, size, mlps.group_best);
    for (int group = 0; group < mlps.groups; group++) {
        int better = 0;
        for (int other = 0; other < mlps.groups; other++)
            better += groups[other] > groups[group] || (groups[other] == groups[group] && other < group);
        if (better >= mlps.groups_used) std::fill_n(choice + group * size, size, TAKEN);
    }
}

}  // namespace

void Deal::reserve(const Mlps& mlps, int step_rows, int portion_rows) {
    grow(choice, step_rows * mlps.experts);
    grow(groups, step_rows * mlps.groups);
    grow(chosen, step_rows * mlps.used);
    grow(weights, step_rows * mlps.choices());
    grow(places, step_rows * mlps.choices());
    grow(rows, step_rows * mlps.used);
    grow(next, mlps.experts + 1);
    portions.reserve(size_t(portions_max(mlps, step_rows, portion_rows)));
}

int portions_max(const Mlps& mlps, int rows, int portion_rows) {
    const int places = rows * mlps.used, busy = std::min(mlps.experts, places);
    return busy + (places - busy) / portion_rows;  // one per expert in use, then one per portion_rows more rows
}

void choose(const Mlps& mlps, float* scores, int row, Deal& deal) {
    float* const choice = &deal.choice[size_t(row * mlps.experts)];
    int32_t* const chosen = &deal.chosen[size_t(row * mlps.used)];
    float* const weights = &deal.weights[size_t(row * mlps.choices())];
    to_probabilities(mlps, scores);
    for (int expert = 0; expert < mlps.experts; expert++)
        choice[expert] = mlps.choice_bias == nullptr ? scores[expert] : scores[expert] + mlps.choice_bias[expert];
    if (mlps.groups_used < mlps.groups) rule_out_groups(mlps, choice, &deal.groups[size_t(row * mlps.groups)]);
    float weight_sum = 0;
    for (int i = 0; i < mlps.used; i++) {
        float* const best = std::max_element(choice, choice + mlps.experts);  // the first of equals
        chosen[i] = int32_t(best - choice);
        weights[i] = scores[chosen[i]];
        weight_sum += weights[i];
        *best = TAKEN;
    }
    const float divisor = mlps.normalized ? weight_sum + WEIGHT_SUM_MIN : 1.0f;
    for (int i = 0; i < mlps.used; i++) weights[i] = weights[i] / divisor * mlps.scale;
    if (!mlps.shared()) return;
    const bool gated = mlps.router.outputs > mlps.experts;
    weights[mlps.used] = gated ? sigmoid(scores[mlps.experts]) : 1.0f;
}

void deal_out(const Mlps& mlps, int rows, int portion_rows, Deal& deal) {
    const int used = mlps.used, choices = mlps.choices();
    std::fill(deal.next.begin(), deal.next.end(), 0);
    for (int i = 0; i < rows * used; i++) deal.next[size_t(deal.chosen[size_t(i)]) + 1]++;
    deal.portions.clear();
    for (int expert = 0; expert < mlps.experts; expert++) {
        const int first = deal.next[size_t(expert)], count = deal.next[size_t(expert) + 1];
        const int portions = portions_of(count, portion_rows);
        for (int i = 0; i < portions; i++) {
            const int from = int(int64_t{count} * i / portions), to = int(int64_t{count} * (i + 1) / portions);
            deal.portions.push_back({expert, first + from, to - from});
        }
        deal.next[size_t(expert) + 1] += first;
    }
    for (int row = 0; row < rows; row++) {
        int32_t* const places = &deal.places[size_t(row * choices)];
        for (int choice = 0; choice < used; choice++) {
            const int32_t place = deal.next[size_t(deal.chosen[size_t(row * used + choice)])]++;
            places[choice] = place;
            deal.rows[size_t(place)] = row;
        }
        if (mlps.shared()) places[used] = rows * used + row;
    }
}

}  // namespace baton
