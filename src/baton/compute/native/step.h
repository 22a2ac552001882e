// One forward pass of a ragged batch.
#pragma once
#include <map>
#include <vector>

#include "model.h"
#include "plan.h"

namespace baton {

// The input of a step. Arrays belong to the caller and are not changed.
struct Batch {
    std::vector<Slice> slices;
    const int32_t* tokens;       // [rows] ids
    const float* angles;         // [positions][head_dim]: cosines, then sines
    std::vector<int32_t> positions;  // [rows]
    int rows = 0;
    int32_t* layers_done;  // written after each layer, and read by other threads
};

class Stepper {
public:
    explicit Stepper(Model& model) : model_(model) {}

    // Compute all rows, and write their keys and values to their blocks. Hidden states stay valid until the next step.
    void forward(const Batch& batch);

    int rows() const { return rows_; }  // of the last step; 0 if it failed

    // Compute the logits [count][vocab] of some rows of the last step.
    void project(const int32_t* rows, int count, float* logits);
    // Write rows of the last step after the final norm: [count][hidden].
    void read(const int32_t* rows, int count, float* hidden) const;

private:
    void reserve(int rows);
    int reserve_experts(int rows);
    void reserve_latent(int rows);
    Rows rounded(const Linear& w, Rows in, int rows, int& phase);
    void route(const Mlps& mlps, const float* norm, int rows, int& phase);
    void pass_experts(const Mlps& mlps, Rows in, int rows, int& phase);
    void multiply(const Linear& w, Rows in, int rows, float* out, int& phase);
    Rows gather(const Mlp& expert, Rows in, int places, int& phase);
    int portion_rows(const Mlps& mlps) const;
    void normalize(const float* weight, int rows, Number number, Rows out, int& phase);
    void pass(const Mlp& mlp, Rows in, int rows, Product finish, float* out, int& phase);
    void plan(const Batch& batch);
    void compute_layer(const Batch& batch, int layer, int& phase);
    void attend_layer(const Batch& batch, int layer, int& phase, float* memory);
    void place_row(const Batch& batch, int layer, int row);
    void place_latents(const Batch& batch, int layer, int& phase);
    void read_values(const Layer& layer, int rows, int& phase);
    void project_heads(const std::vector<Linear>& heads, Rows in, int rows, Rows out, int width, Number number,
                       int& phase);
    uint8_t* slot(const Batch& batch, int layer, int plane, int row) const;

    Model& model_;
    int rows_ = 0;
    std::map<int, AttentionPlan> plans_;  // by window
    std::vector<int32_t> slice_of_row_;
    Deal deal_;
    Memory hidden_, inputs_, qkv_, queries_, attended_, gated_, parts_, picked_, work_, rounded_;
    Memory exact_, scores_, gathered_, results_;  // of experts
    Memory narrow_, wide_, nope_, read_;          // of latent attention
    float *x_ = nullptr, *qkv_rows_ = nullptr, *wide_rows_ = nullptr;
    Rows in_{}, attended_rows_{}, gated_rows_{}, narrow_rows_{}, nope_rows_{}, read_rows_{};
    Queries query_rows_{};
    int64_t work_floats_ = 0;
};

}  // namespace baton
