// The C interface for Python, the only exported functions. Functions that can fail return an error message, or null.
#if defined(__x86_64__)
#include <cpuid.h>
#else
#include <sys/auxv.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>

#include "api.h"
#include "shared_weights.h"
#include "step.h"
#include "weight_checks.h"

using namespace baton;

namespace {

struct Engine {
    Engine(const Sizes& sizes, DType dtype, const Arena& arena, const Kernels& kernels,
           const ThreadPlacement& placement)
        : model(sizes, dtype, arena, kernels, placement), stepper(model) {}

    Model model;
    Stepper stepper;
    std::string error;
    bool ready = false;  // all weights are set and checked
};

#if defined(__x86_64__)
const Kernels* const ALL_KERNELS[] = {&AMX, &AVX512BF16, &AVX512, &AVXVNNI, &AVX2, &PLAIN};  // the best first

// Processors without AVX-512 may have its dot instructions for shorter vectors.
bool has_avx_vnni() {
    constexpr unsigned AVX_VNNI = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}

// Linux enables the large AMX state only for processes that request it. Source: Documentation/arch/x86/xstate.rst.
bool amx_granted() {
#if defined(BATON_EMULATE_AMX)
    return true;
#else
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & AMX_BF16) && (d & AMX_TILE) && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

bool usable(const Kernels& kernels) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (&kernels == &AMX) return avx512_bf16 && amx_granted();
    if (&kernels == &AVX512BF16) return avx512_bf16;
    if (&kernels == &AVX512) return avx512;
    if (&kernels == &AVXVNNI) return avx2 && has_avx_vnni();
    return &kernels == &AVX2 ? avx2 : true;
}
#else
const Kernels* const ALL_KERNELS[] = {&NEON_DOT, &NEON, &PLAIN};

bool usable(const Kernels& kernels) {  // every 64-bit ARM processor has NEON
    constexpr unsigned long ASIMDDP = 1ul << 20;  // Source: Documentation/arch/arm64/elf_hwcaps.rst
    return &kernels != &NEON_DOT || (getauxval(AT_HWCAP) & ASIMDDP) != 0;
}
#endif

const Kernels* kernels_named(const char* name) {
    for (const Kernels* kernels : ALL_KERNELS)
        if (kernels != nullptr && std::strcmp(kernels->name, name) == 0 && usable(*kernels)) return kernels;
    return nullptr;
}

// Run code that may throw (out of memory or threads), and keep the message for the caller.
template <class F>
const char* catch_errors(std::string& error, F body) {
    try {
        error = body();
    } catch (const std::exception& problem) {
        error = problem.what();
    }
    return error.empty() ? nullptr : error.c_str();
}

template <class F>
const char* catch_errors(Engine& engine, F body) {
    return catch_errors(engine.error, body);
}

template <class Part>
std::string check_layer_part(const Model& model, int32_t, const Part& part) {
    return check(model.sizes, part);
}

std::string check_layer_part(const Model& model, int32_t index, const BatonMlp& mlp) {
    return check(model.sizes, mlp, model.mlps[size_t(index)]);
}

// Set a part of the weights of layer `index`, unless the index or the shapes are wrong.
template <class Part, class F>
const char* set_part(Engine& engine, int32_t index, const Part& part, F body) {
    return catch_errors(engine, [&] {
        const Model& model = engine.model;
        std::string problem = check_range("the index of a layer", index, 0, model.sizes.layers - 1);
        if (problem.empty() && engine.ready) problem = "the weights are complete";
        if (problem.empty()) problem = check_layer_part(model, index, part);
        if (problem.empty()) body();
        return problem;
    });
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Check that every slice is inside its block table and the angles, and that the slices together fill the arrays.
static std::string check_slices(const BatonStep& step, int64_t block_tokens) {
    int64_t rows = 0, entries = 0;
    for (int32_t i = 0; i < step.slices; i++) {
        const int64_t start = step.starts[i], count = step.counts[i], blocks = step.block_counts[i];
        if (start < 0 || count < 1) return mismatch("a slice of ", count, " tokens starts at token ", start);
        if (blocks < 0 || blocks * block_tokens < start + count)
            return mismatch("a slice ends at token ", start + count, ", its block table holds ", blocks * block_tokens);
        if (start + count > step.positions)
            return mismatch("a slice ends at token ", start + count, ", there are angles for ", step.positions);
        if (step.read != nullptr && (step.read[i] < 0 || step.read[i] > count))
            return mismatch("asked to read ", step.read[i], " tokens of a slice of ", count);
        rows += count, entries += blocks;
    }
    if (step.slices < 1 || rows != step.rows)
        return mismatch("the slices have ", rows, " tokens, the step has ", step.rows);
    if (entries != step.entries)
        return mismatch("the block tables have ", entries, " entries, the step has ", step.entries);
    return "";
}

// Check the ids of a step's blocks. Slots of the spill space are read only: they hold no new tokens.
static std::string check_blocks(const BatonStep& step, const Arena& arena) {
    const int32_t* blocks = step.blocks;
    for (int32_t slice = 0; slice < step.slices; slice++) {
        for (int32_t i = 0; i < step.block_counts[slice]; i++) {
            const int64_t slot = int64_t{blocks[i]} - SPILLED_FROM;
            const bool is_full = int64_t{i + 1} * arena.block_tokens <= step.starts[slice];
            if (is_full && slot >= 0 && slot < arena.spill_slots) continue;
            if (blocks[i] < 0 || blocks[i] >= arena.blocks)
                return mismatch("block ", blocks[i], " is outside of an arena of ", arena.blocks);
        }
        blocks += step.block_counts[slice];
    }
    return "";
}

// Check ids of tokens and blocks: an invalid one would access memory outside of the tables and the arena.
static std::string check(const Model& model, const BatonStep& step) {
    std::string problem = check_slices(step, model.arena.block_tokens);
    if (problem.empty())
        problem = check_below(step.tokens, step.rows, model.sizes.vocab, "token ", " is outside of a vocabulary of ");
    if (problem.empty()) problem = check_blocks(step, model.arena);
    return problem;
}

// Check that the requested rows are rows of the last step.
static std::string check_rows(const Engine& engine, const int32_t* rows, int32_t count) {
    if (count < 0) return mismatch("asked for ", count, " rows of a step of ", engine.stepper.rows());
    std::string problem = check_below(rows, count, engine.stepper.rows(), "row ", " is outside of a step of ");
    for (int32_t i = 0; problem.empty() && i < count; i++)
        if (!engine.stepper.can_read(rows[i]))
            problem = mismatch("row ", rows[i], " was not to be read, in a step of ", engine.stepper.rows());
    return problem;
}

static Linear pack_any(Model& model, const BatonMatrix& m, bool interleaved) {
    const Matrix matrix{m.data, m.bias, m.rows, m.inputs, interleaved};
    if (!is_quantized(DType(m.dtype))) return pack(model, matrix, model.dtype);
    return pack_quant(model, {matrix, DType(m.dtype), m.scales, static_cast<const uint16_t*>(m.minimums)});
}

// Split stacked matrices into one matrix per head.
static std::vector<Linear> pack_heads(Model& model, const BatonMatrix& m) {
    const int heads = model.sizes.heads, rows = m.rows / heads;
    const int64_t head_bytes = int64_t{rows} * m.inputs * model.element_bytes();
    std::vector<Linear> packed;
    for (int head = 0; head < heads; head++) {
        const void* data = static_cast<const uint8_t*>(m.data) + head * head_bytes;
        packed.push_back(pack(model, {data, nullptr, rows, m.inputs, false}, model.dtype));
    }
    return packed;
}

static Sizes sizes_of(const BatonModel& m) {
    const BatonLatentSizes& l = m.latent;
    const float scale = l.kv_rank > 0 ? l.score_scale : 1.0f / std::sqrt(float(m.head_dim));
    return {m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.vocab, m.rms_eps, scale,
            {l.q_rank, l.kv_rank, l.rope_dim, l.nope_dim, l.value_dim}};
}

static Engine* new_engine(const BatonModel* m, const Kernels& kernels) {
    const Sizes sizes = sizes_of(*m);
    const DType kv_dtype = DType(m->kv_dtype);
    const int64_t token_bytes = m->kv_heads * kv_head_bytes(kv_dtype, m->head_dim);
    const int planes = sizes.is_latent() ? 1 : 2;
    const Arena arena{nullptr, 0, m->block_tokens, m->layers, planes, token_bytes, kv_dtype};
    ThreadPlacement placement{m->threads, {}};
    if (m->cores != nullptr) placement.cores.assign(m->cores, m->cores + m->threads);
    return new Engine(sizes, DType(m->dtype), arena, kernels, placement);
}

// Create an engine without weights: *made. The calling thread keeps an error message, since no engine exists.
EXPORT const char* baton_new(const BatonModel* m, Engine** made) {
    thread_local std::string error;
    return catch_errors(error, [&] {
        const Kernels* kernels = kernels_named(m->kernels);
        if (kernels == nullptr) return std::string("this machine has no kernels ") + m->kernels;
        if (std::string problem = check(*m); !problem.empty()) return problem;
        *made = new_engine(m, *kernels);
        return std::string();
    });
}

EXPORT void baton_free(Engine* engine) { delete engine; }

// Set the memory of the KV blocks for the next steps.
EXPORT void baton_set_arena(Engine* engine, uint8_t* bytes, int64_t blocks) {
    engine->model.arena.bytes = bytes;
    engine->model.arena.blocks = blocks;
}

// Set the memory of the spill space for the next steps.
EXPORT void baton_set_spill(Engine* engine, uint8_t* bytes, int64_t slots) {
    engine->model.arena.spill = bytes;
    engine->model.arena.spill_slots = slots;
}

EXPORT const char* baton_set_layer(Engine* engine, int32_t index, const BatonLayer* l) {
    return set_part(*engine, index, *l, [&] {
        Model& model = engine->model;
        const Sizes& s = model.sizes;
        Layer& layer = model.layers[size_t(index)];
        layer.input_norm = copy_values(model, l->input_norm, s.hidden);
        layer.mlp_norm = copy_values(model, l->mlp_norm, s.hidden);
        layer.q_norm = copy_values(model, l->q_norm, s.head_dim);
        layer.k_norm = copy_values(model, l->k_norm, s.head_dim);
        layer.qkv = pack_any(model, l->qkv, false), layer.o = pack_any(model, l->o, false);
        layer.window = l->window;
    });
}

// Set the weights of latent attention other than qkv.
EXPORT const char* baton_set_latent(Engine* engine, int32_t index, const BatonLatent* l) {
    return set_part(*engine, index, *l, [&] {
        Model& model = engine->model;
        LatentLayer& latent = model.layers[size_t(index)].latent;
        latent.q_norm = copy_values(model, l->q_norm, model.sizes.latent.q_rank);
        latent.kv_norm = copy_values(model, l->kv_norm, model.sizes.latent.kv_rank);
        if (model.sizes.latent.q_rank > 0) latent.queries = pack_any(model, l->queries, false);
        latent.keys = pack_heads(model, l->keys), latent.values = pack_heads(model, l->values);
    });
}

// Set the router of a layer with experts.
EXPORT const char* baton_set_router(Engine* engine, int32_t index, const BatonRouter* r) {
    return set_part(*engine, index, *r, [&] {
        Mlps& mlps = engine->model.mlps[size_t(index)];
        const Matrix scores{r->scores.data, nullptr, r->scores.rows, r->scores.inputs, false};
        mlps.router = pack(engine->model, scores, DType::F32);
        mlps.experts = r->experts, mlps.experts_per_token = r->used, mlps.normalized = r->normalized != 0;
        mlps.sigmoid = r->sigmoid != 0, mlps.scale = r->scale;
        mlps.groups = r->groups, mlps.groups_used = r->groups_used, mlps.group_best = r->group_best;
        mlps.choice_bias = copy_values(engine->model, r->choice_bias, r->experts);
    });
}

// Add the MLP of a layer; or its experts in order, and then the shared MLP.
EXPORT const char* baton_add_mlp(Engine* engine, int32_t index, const BatonMlp* m) {
    return set_part(*engine, index, *m, [&] {
        Model& model = engine->model;
        model.mlps[size_t(index)].all.push_back({pack_any(model, m->gate_up, true), pack_any(model, m->down, false)});
    });
}

// Check that all weights of all layers were set.
static std::string check_layers(const Model& model) {
    for (const Layer& layer : model.layers)
        if (std::string problem = check(model.sizes, layer); !problem.empty()) return problem;
    for (const Mlps& mlps : model.mlps)
        if (std::string problem = check(mlps); !problem.empty()) return problem;
    return "";
}

// Write the weights that are set from now on into an empty memory file, for `baton_attach_weights` of other processes.
// The file may be closed when the weights are finished. key: names the version of the library and the form of weights.
EXPORT const char* baton_share_weights(Engine* engine, int32_t file, const char* key) {
    return catch_errors(*engine, [&] {
        if (engine->ready) return std::string("the weights are complete");
        begin_sharing(engine->model, file, key);
        return std::string();
    });
}

// Take all weights from a sealed file with the same key.
EXPORT const char* baton_attach_weights(Engine* engine, int32_t file, const char* key) {
    return catch_errors(*engine, [&] {
        if (engine->ready) return std::string("the weights are complete");
        attach_weights(engine->model, file, key);
        const std::string problem = check_layers(engine->model);
        engine->ready = problem.empty();
        return problem;
    });
}

// Set the last weights of a model, and check its shapes. embedding: null if it is tied to the output projection.
EXPORT const char* baton_finish_weights(Engine* engine, const float* final_norm, const BatonMatrix* head,
                                        const BatonMatrix* embedding) {
    return catch_errors(*engine, [&] {
        Model& model = engine->model;
        const Sizes& s = model.sizes;
        if (engine->ready) return std::string("the weights are complete");
        std::string shapes = first_problem({check_pointer("final_norm", final_norm), check_matrix("head", *head, s.vocab, s.hidden),
                                            embedding == nullptr ? "" : check_matrix("embedding", *embedding, s.vocab, s.hidden)});
        if (!shapes.empty()) return shapes;
        if (std::string problem = check_layers(model); !problem.empty()) return problem;
        model.final_norm = copy_values(model, final_norm, model.sizes.hidden);
        model.head = pack_any(model, *head, false);
        model.embedding = model.head;
        if (embedding != nullptr) model.embedding = pack_any(model, *embedding, false);
        if (model.weights.has_file()) finish_sharing(model);
        engine->ready = true;
        return std::string();
    });
}

EXPORT const char* baton_forward(Engine* engine, const BatonStep* step) {
    return catch_errors(*engine, [&] {
        if (!engine->ready) return std::string("the weights are not complete");
        if (std::string problem = check(engine->model, *step); !problem.empty()) return problem;
        Batch batch{{}, {}, step->tokens, step->angles, {}, step->rows, 0, step->layers_done};
        const int32_t* blocks = step->blocks;
        for (int32_t slice = 0, first = 0; slice < step->slices; slice++) {
            const int32_t count = step->counts[slice], start = step->starts[slice];
            const int32_t read = step->read == nullptr ? count : step->read[slice], unread = count - read;
            batch.slices.push_back({first, count, start, blocks});
            if (read > 0) batch.read_slices.push_back({first + unread, read, start + unread, blocks});
            for (int32_t i = 0; i < count; i++) batch.positions.push_back(start + i);
            batch.rows_read += read;
            first += count;
            blocks += step->block_counts[slice];
        }
        engine->stepper.forward(batch);
        return std::string();
    });
}

EXPORT const char* baton_project(Engine* engine, const int32_t* rows, int32_t count, float* logits) {
    return catch_errors(*engine, [&] {
        std::string problem = check_rows(*engine, rows, count);
        if (problem.empty()) engine->stepper.project(rows, count, logits);
        return problem;
    });
}

EXPORT const char* baton_read(Engine* engine, const int32_t* rows, int32_t count, float* hidden) {
    return catch_errors(*engine, [&] {
        std::string problem = check_rows(*engine, rows, count);
        if (problem.empty()) engine->stepper.read_hidden(rows, count, hidden);
        return problem;
    });
}

// Add a guest thread: the next steps use a core of another worker while that is idle. Return whether the system allows
// it.
EXPORT bool baton_add_guest(Engine* engine, int32_t core) {
    try {
        return engine->model.thread_pool.add_guest(core);
    } catch (...) {  // the system cannot create another thread
        return false;
    }
}

// Return how often guests were recalled because the owners of their cores became active.
EXPORT int64_t baton_recalls(const Engine* engine) { return engine->model.thread_pool.recalls(); }

// Return the name of the index-th instruction set of this machine, the best first; null after the last.
EXPORT const char* baton_usable_kernels(int32_t index) {
    int32_t found = 0;
    for (const Kernels* kernels : ALL_KERNELS)
        if (kernels != nullptr && usable(*kernels) && found++ == index) return kernels->name;
    return nullptr;
}

}  // extern "C"
