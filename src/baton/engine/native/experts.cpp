#include "experts.h"

#include <algorithm>
#include <cmath>

namespace baton {
namespace {

constexpr float TAKEN = -1.0f;            // below every probability
constexpr float WEIGHT_SUM_MIN = 1e-20f;  // as in models/experts.py

int portions_of(int rows, int portion_rows) { return (rows + portion_rows - 1) / portion_rows; }

template <class T>
void grow(std::vector<T>& list, int count) {
    if (list.size() < size_t(count)) list.resize(size_t(count));
}

}  // namespace

void Deal::reserve(const Mlps& mlps, int step_rows, int portion_rows) {
    grow(chosen, step_rows * mlps.used);
    grow(weights, step_rows * mlps.choices());
    grow(places, step_rows * mlps.choices());
    grow(rows, step_rows * mlps.used);
    grow(next, mlps.experts + 1);
    portions.reserve(size_t(portions_max(mlps, step_rows, portion_rows)));
}

int portions_max(const Mlps& mlps, int rows, int portion_rows) {
    const int places = rows * mlps.used, busy = std::min(mlps.experts, places);
    return busy + (places - busy) / portion_rows;  // one each; another for as many rows as it can still take
}

void choose(const Mlps& mlps, float* scores, int32_t* chosen, float* weights) {
    float* const end = scores + mlps.experts;
    const float most = *std::max_element(scores, end);
    float total = 0, weight_sum = 0;
    for (float* score = scores; score < end; score++) {
        *score = std::exp(*score - most);
        total += *score;
    }
    for (float* score = scores; score < end; score++) *score /= total;
    for (int choice = 0; choice < mlps.used; choice++) {
        float* const best = std::max_element(scores, end);  // the first of equals
        chosen[choice] = int32_t(best - scores);
        weights[choice] = *best;
        weight_sum += *best;
        *best = TAKEN;
    }
    if (mlps.normalized)
        for (int choice = 0; choice < mlps.used; choice++) weights[choice] /= weight_sum + WEIGHT_SUM_MIN;
    if (!mlps.shared()) return;
    const bool gated = mlps.router.outputs > mlps.experts;
    weights[mlps.used] = gated ? 1.0f / (1.0f + std::exp(-scores[mlps.experts])) : 1.0f;
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
