// One forward pass of a ragged batch.
#pragma once
#include <map>
#include <vector>

#include "gemm_tiling.h"
#include "model.h"
#include "plan.h"

namespace baton {

// The input of a step. Arrays belong to the caller and are not changed.
struct Batch {
    std::vector<Slice> slices;
    std::vector<Slice> read_slices;  // the parts whose hidden states are read afterwards: all that the last layer needs
    const int32_t* tokens;       // [rows] ids
    const float* angles;         // [positions][rotary_dim]: cosines, then sines of RoPE
    std::vector<int32_t> positions;  // [rows]
    int rows = 0, rows_read = 0;
    int32_t* layers_done;  // written after each layer, and read by other threads
};

class Stepper {
public:
    explicit Stepper(Model& model) : model_(model) {}

    // Compute all rows, and write their keys and values to their blocks. Hidden states stay valid until the next step.
    void forward(const Batch& batch);

    int rows() const { return rows_; }  // of the last step; 0 if it failed
    bool can_read(int row) const { return places_[size_t(row)] != NO_PLACE; }  // of a row of the last step

    // Compute the logits [count][vocab] of some rows of the last step.
    void project(const int32_t* rows, int count, float* logits);
    // Write rows of the last step after the final norm: [count][hidden].
    void read_hidden(const int32_t* rows, int count, float* hidden) const;

private:
    static constexpr int32_t NO_PLACE = -1;

    void reserve(int rows);
    int reserve_experts(int rows);
    void reserve_latent(int rows);
    Rows quantized_rows(const Linear& w, Rows in, int rows, int& phase);
    GemmTiling tile(const Linear& w, int rows) const;
    void route(const Mlps& mlps, const float* norm, int rows, int& phase);
    void compute_experts(const Mlps& mlps, Rows in, int rows, int& phase);
    void multiply(const Linear& w, Rows in, int rows, float* out, int& phase);
    Rows gather(const Mlp& expert, Rows in, int places, int& phase);
    int expert_block_rows(const Mlps& mlps) const;
    Rows normed_rows(const float* weight, const Linear& w, int rows, int& phase);
    void rms_norm(const float* weight, int rows, DType dtype, Rows out, int& phase);
    void compute_mlp(const Mlp& mlp, Rows in, int rows, PanelKernel finish, float* out, int& phase);
    void plan(const Batch& batch);
    int rows_of(const Batch& batch, int layer) const;
    const float* hidden_row(int row) const { return residual_ + int64_t{places_[size_t(row)]} * model_.sizes.hidden; }
    void gather_read_rows(const Batch& batch, Rows out);
    void mlp_layer(const Batch& batch, int layer, int& phase);
    void attention_layer(const Batch& batch, int layer, int& phase, float* memory);
    void rope_and_write_row(const Batch& batch, int layer, int row);
    void rope_and_write_latents(const Batch& batch, int layer, int& phase);
    void project_values(const Layer& layer, int rows, int& phase);
    void project_heads(const std::vector<Linear>& heads, Rows in, int rows, Rows out, int width, DType dtype,
                       int& phase);
    uint8_t* slot(const Batch& batch, int layer, int plane, int row) const;

    Model& model_;
    int rows_ = 0;
    std::map<int, AttentionPlan> plans_;  // by attention window
    AttentionPlan read_plan_;             // of the last layer
    std::vector<int32_t> slice_of_row_;
    std::vector<int32_t> places_;  // of each row of the step in residual_ after the last layer, or NO_PLACE
    ExpertAssignment assignment_;
    GrowingBuffer hidden_, inputs_, qkv_, queries_, attention_out_, gated_, partials_, selected_, scratch_, quantized_;
    GrowingBuffer f32_inputs_, scores_, gathered_, results_;            // of experts
    GrowingBuffer query_latents_, latent_queries_, nope_, latent_out_;  // of latent attention
    float *residual_ = nullptr, *qkv_rows_ = nullptr, *latent_query_rows_ = nullptr;
    Rows gemm_in_{}, attention_out_rows_{}, gated_rows_{}, query_latent_rows_{}, nope_rows_{}, latent_out_rows_{};
    Queries query_rows_{};
    int64_t scratch_floats_ = 0;
};

}  // namespace baton
