"""Parallelism of one worker over GPUs, and the memory check for a model."""

from __future__ import annotations

from msgspec import Struct, structs

from baton.decide.cost.hardware import Hardware
from baton.decide.cost.model import FORMAT_BYTES, Format, KVFormat, ModelShape

MEMORY_RATIO = 0.9
"""Share of a GPU's memory that an engine uses. The rest is for the driver, the allocator and CUDA graphs."""
ACTIVATION_TOKENS = 2048
"""Memory is reserved for the activations of a step of this many tokens."""


class Precision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Formats of weights and KV."""

    weights: Format = "bf16"
    kv: KVFormat = "bf16"


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one worker: tp x pp x cp x dp of them."""

    tp: int = 1
    """Tensor parallel: every matrix is split; two all-reduces per layer."""
    pp: int = 1
    """Pipeline parallel: stages that share the layers."""
    cp: int = 1
    """Context parallel: prompt tokens and KV are split, weights are not."""
    dcp: int = 1
    """Decode context parallel: of the `tp` GPUs, so many share the tokens of a KV head, instead of each holding all."""
    dp: int = 1
    """Attention data parallel: each rank serves its own requests; all ranks share the experts."""
    ep: int = 1
    """Expert parallel: GPUs of a stage over which experts are distributed. tp x cp x dp / ep GPUs split each expert."""
    overlap_tokens_min: int = 0
    """Tokens of a step from which it runs as two micro-batches, one exchanged while the other is computed. 0: never."""

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage."""
        return self.tp * self.cp * self.dp

    def problems(self, model: ModelShape) -> list[str]:
        """Return every degree that does not divide the model. Empty: the parallelism is possible."""
        degrees = (
            ("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("dcp", self.dcp), ("dp", self.dp), ("ep", self.ep),
        )  # fmt: skip
        found = [f"{name} is {degree}, but must be at least 1" for name, degree in degrees if degree < 1]
        if found:
            return found
        if model.heads % self.tp:
            found.append(
                f"tp {self.tp} does not divide the {model.heads} heads of {model.name}; try {_near(model, self)}"
            )
        if self.pp > model.layers:
            found.append(f"pp {self.pp} is more than the {model.layers} layers of {model.name}")
        heads = 1 if model.latent else model.kv_heads
        if self.dcp > 1 and self.tp % (heads * self.dcp):
            found.append(
                f"dcp {self.dcp} needs tp to be a multiple of {heads * self.dcp}, {self.dcp} GPUs for each KV head of "
                f"{model.name}, and tp is {self.tp}: leave dcp out"
            )
        if self.ep > 1 and model.experts is None:
            found.append(f"ep {self.ep}, but {model.name} has no experts: leave ep out")
        if model.experts and self.ep > model.experts.experts:
            most = experts_gpus_max(self.stage_gpus, model.experts.experts)
            found.append(
                f"ep {self.ep} is more than the {model.experts.experts} experts of {model.name}: try ep {most}, which "
                "splits each expert over the rest of the GPUs"
            )
        elif self.ep > 1 and model.experts and self.stage_gpus % self.ep:
            found.append(f"ep {self.ep} does not divide the {self.stage_gpus} GPUs (tp x cp x dp) of a stage")
        return found


def experts_gpus_max(stage_gpus: int, experts: int) -> int:
    """Return the maximum `ep`: it divides the GPUs of the stage and leaves at least one expert per GPU."""
    return max(degree for degree in range(1, min(stage_gpus, experts) + 1) if stage_gpus % degree == 0)


def _near(model: ModelShape, parallel: Parallel) -> str:
    fitting = [degree for degree in range(1, 65) if model.heads % degree == 0]
    return f"tp {min(fitting, key=lambda degree: abs(degree - parallel.tp))}"


class MemorySplit(Struct, frozen=True, kw_only=True):
    """Use of the memory of one GPU of a worker."""

    weights_bytes: float
    activations_bytes: float
    kv_bytes: float
    """Memory left for KV. Negative if the weights do not fit."""
    kv_tokens: int
    """KV tokens of the whole worker."""


def split_memory(
    model: ModelShape, hardware: Hardware, parallel: Parallel, precision: Precision, draft: ModelShape | None = None
) -> MemorySplit:
    """Divide a worker's memory into weights, activations and KV, draft model included."""
    weights_bytes = _weights_bytes(model, parallel, precision)
    activations_bytes = 2 * ACTIVATION_TOKENS * (4 * model.d + 2 * model.ffn / parallel.tp)
    kv_bytes = kv_token_gpu_bytes(model, parallel, precision.kv)
    if draft is not None:
        beside = draft_parallel(draft, parallel)
        weights_bytes += _weights_bytes(draft, beside, precision)
        kv_bytes += kv_token_gpu_bytes(draft, beside, precision.kv)
    free_bytes = hardware.memory_bytes * MEMORY_RATIO - weights_bytes - activations_bytes
    kv_tokens = max(0, int(free_bytes / kv_bytes)) * parallel.cp * parallel.dp
    return MemorySplit(
        weights_bytes=weights_bytes, activations_bytes=activations_bytes, kv_bytes=free_bytes, kv_tokens=kv_tokens
    )


def draft_parallel(draft: ModelShape, parallel: Parallel) -> Parallel:
    """Return the parallelism of a draft model: the largest tp, up to the target's, that divides the draft's heads."""
    return Parallel(tp=max(degree for degree in range(1, parallel.tp + 1) if draft.heads % degree == 0))


def kv_token_gpu_bytes(model: ModelShape, parallel: Parallel, kv: KVFormat) -> float:
    """Return the KV bytes of a token per GPU. A rank holds the whole latent, and at least one whole head.

    With `dcp`, it does so for some of the tokens, and the result is the mean.
    """
    layers = -(-model.layers // parallel.pp) / parallel.dcp
    if model.latent is not None:
        return layers * model.kv_values() * FORMAT_BYTES[kv]
    return layers * 2 * max(1.0, model.kv_heads / parallel.tp) * model.head_dim * FORMAT_BYTES[kv]


def _weights_bytes(model: ModelShape, parallel: Parallel, precision: Precision) -> float:
    """Return the weight bytes on the fullest GPU: that of the longest stage, with the embedding or the head."""
    each = FORMAT_BYTES[precision.weights]
    share = -(-model.layers // parallel.pp) / model.layers
    experts = model.experts
    expert_params = model.expert_layers * experts.experts * model.expert_params if experts else 0
    dense_params = model.params - model.embedding_params - expert_params
    spread = parallel.stage_gpus
    embedding = model.embedding_params * 2.0 / parallel.tp / (1 if parallel.pp == 1 or model.tied else 2)
    return share * each * (dense_params / parallel.tp + expert_params / spread) + embedding


def worker_problems(
    model: ModelShape, hardware: Hardware, parallel: Parallel, precision: Precision, draft: ModelShape | None = None
) -> list[str]:
    """Return every reason why a worker cannot run a model, with the nearest alternative. Empty: it can.

    Used for cluster files and by the planner.
    """
    problems = parallel.problems(model)
    if problems:
        return problems
    wide = parallel.tp * parallel.cp
    if wide > hardware.gpus_per_node:
        problems.append(
            f"tp {parallel.tp} x cp {parallel.cp} takes {wide} GPUs of one node, and a node of {hardware.name} has "
            f"{hardware.gpus_per_node}: try tp {_widest(model, hardware)}, and pp for more GPUs"
        )
    if precision.weights == "fp8" and hardware.fp8_flops is None:
        problems.append(
            f"{hardware.name} does not compute in fp8: try weights bf16 or int8, or a GPU that does, such as H100"
        )
    problem = None if problems else _fit_problem(model, hardware, parallel, precision, draft)
    return problems if problem is None else [problem]


def _widest(model: ModelShape, hardware: Hardware) -> int:
    return max(degree for degree in range(1, hardware.gpus_per_node + 1) if model.heads % degree == 0)


def _fit_problem(
    model: ModelShape, hardware: Hardware, parallel: Parallel, precision: Precision, draft: ModelShape | None
) -> str | None:
    """Return an error message with the numbers and the nearest alternative if a model does not fit, else None."""
    have = split_memory(model, hardware, parallel, precision, draft)
    if have.kv_tokens > 0:
        return None
    gib = 2**30
    usable = f"{hardware.memory_bytes * MEMORY_RATIO / gib:.1f} of {hardware.memory_bytes / gib:.0f} GiB are usable"
    both = model.name if draft is None else f"{model.name} with the draft model {draft.name}"
    return (
        f"{both} does not fit {hardware.name} with tp {parallel.tp} pp {parallel.pp}: "
        f"{have.weights_bytes / gib:.1f} GiB of weights ({precision.weights}) per GPU and "
        f"{have.activations_bytes / gib:.1f} GiB of activations, but {usable}; "
        f"{_nearest_fit(model, hardware, parallel, precision, draft)}"
    )


def _nearest_fit(
    model: ModelShape, hardware: Hardware, parallel: Parallel, precision: Precision, draft: ModelShape | None
) -> str:
    """Describe the alternatives that fit: the lowest tp, the lowest pp, and the most precise weights."""
    found: list[str] = []
    tps = [degree for degree in (2, 4, 8, 16) if degree * parallel.cp <= hardware.gpus_per_node]
    wider = (structs.replace(parallel, tp=tp) for tp in tps if tp > parallel.tp and model.heads % tp == 0)
    deeper = (structs.replace(parallel, pp=pp) for pp in (2, 4, 8) if pp > parallel.pp)
    for name, choices in (("tp", wider), ("pp", deeper)):
        for choice in choices:
            if split_memory(model, hardware, choice, precision, draft).kv_tokens > 0:
                found.append(f"tp {choice.tp}" if name == "tp" else f"pp {choice.pp}")
                break
    formats: tuple[Format, ...] = ("fp8" if hardware.fp8_flops is not None else "int8", "int4")
    for weights in formats:
        smaller = Precision(weights=weights, kv=precision.kv)
        if weights != precision.weights and split_memory(model, hardware, parallel, smaller, draft).kv_tokens > 0:
            found.append(f"{weights} weights")
            break
    if draft is not None and split_memory(model, hardware, parallel, precision).kv_tokens > 0:
        found.append("no draft model, or a smaller one")
    if found:
        return f"what fits: {', or '.join(found)}"
    return f"no tp up to {max(tps, default=1)} or pp up to 8 fits it: take a larger GPU"
