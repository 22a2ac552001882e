"""A cost model from hardware peaks: matrix products, attention, elementwise work, exchange, and the engine's overhead.

Per GPU, for a step of N tokens:

    kernels = stage(N) * rounds + head, where
    stage   = layers / pp * (products + elementwise + all-reduce + prompt attention + decode attention + exchange
              of context-parallel parts) + send
    step    = factor * kernels + overhead + request_s * decoding requests + layer_s * layers

Pipeline: a step is cut into m = pp micro-batches (fewer where it has fewer tokens). A step of decode alone takes pp
stages: in the steady state, a micro-batch starts its next token as soon as its last one is out. A step with prompt
tokens takes m + pp - 1: the pipeline fills, and the first token waits until it has drained.
Source: calibrated on AIConfigurator's operator data and on measured engines; the errors are in docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.types import StepShape, prompt_step
from baton.decide.cost.curve import Curve
from baton.decide.cost.engine_profile import EngineProfile
from baton.decide.cost.handoff import HandoffLink
from baton.decide.cost.hardware import Hardware
from baton.decide.cost.layer import AttentionCost, LayerCost
from baton.decide.cost.model import FORMAT_BYTES, ModelShape
from baton.decide.cost.parallel import Parallel, Precision

ONE_GPU = Parallel()
PLAIN = Precision()
MEMO_MAX = 65_536
"""Number of entries at which a cache is cleared. Rarely reached: a batch limit allows fewer token counts."""


_PromptKey = tuple[int, int, float, int]
"""Prompt tokens, chunks, pairs and decoding requests of a step."""


class _PromptParts(NamedTuple):
    """Parts of the time of a step with prompt tokens that do not depend on the context of its decodes."""

    alone_s: float
    """Time of a step with the prompts and no decodes."""
    factor: float
    """Factor on the kernel time of prompts."""
    extra_s: float
    """Time of the decode step outside of kernels."""
    fixed_s: float
    """Kernel time of the whole step, without the reads of context."""
    token_s: float
    """Kernel time per token of context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Cost model of one worker from hardware peaks. Implements `CostModel`."""

    model: ModelShape
    hardware: Hardware
    parallel: Parallel = ONE_GPU
    precision: Precision = PLAIN
    engine: EngineProfile
    wire: HandoffLink | None = None
    """Link to other hosts. None: the inter-node links of all of the worker's GPUs."""
    query_tokens: int = 1
    """Tokens per decoding request and step: 1, or 1 + drafted tokens."""
    measured_layer: Curve | None = None
    """Measured seconds of one layer without attention and exchange, by tokens. None: computed from the peaks."""
    _layer: LayerCost = field(init=False)
    _attention: AttentionCost = field(init=False)
    _wires: tuple[HandoffLink, HandoffLink] = field(init=False)
    _stages_s: dict[tuple[float, float], float] = field(init=False, default_factory=dict[tuple[float, float], float])
    _decodes_s: dict[int, tuple[float, float]] = field(init=False, default_factory=dict[int, tuple[float, float]])
    _prompt_parts: dict[_PromptKey, _PromptParts] = field(
        init=False, default_factory=dict["_PromptKey", "_PromptParts"]
    )

    def __post_init__(self) -> None:
        """Create the parts that do not change between steps."""
        parts = (self.model, self.hardware, self.parallel, self.precision)
        object.__setattr__(self, "_layer", LayerCost(*parts, self.measured_layer))
        object.__setattr__(self, "_attention", AttentionCost(*parts))
        gpus, hardware = self.parallel.gpus, self.hardware
        between = self.wire or HandoffLink(bytes_per_s=hardware.inter_node_bytes_per_s * gpus)
        inside = HandoffLink(bytes_per_s=hardware.intra_node_bytes_per_s * gpus)
        object.__setattr__(self, "_wires", (between, inside))

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        if new_tokens == 0:
            return 0.0
        return self.step_s(prompt_step(new_tokens, cached_tokens))

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step.

        A mixed step takes the time of its decode step, plus the time of the kernels that the prompts add, times the
        prompt factor. It takes at least the time of the prompts alone.
        """
        if shape.prefill_tokens == 0:
            return self._decode_s(shape)
        key = (shape.prefill_tokens, shape.prefill_chunks, shape.prefill_pairs, shape.decode_requests)
        known = self._prompt_parts.get(key)
        if known is None:
            if len(self._prompt_parts) >= MEMO_MAX:
                self._prompt_parts.clear()
            known = self._prompt_parts[key] = self._compute_prompt_parts(shape)
        alone_s, factor, extra_s, fixed_s, token_s = known
        if not shape.decode_requests:
            return alone_s
        decode_s = self._decode_s(shape)
        added_s = fixed_s + token_s * shape.context_tokens - (decode_s - extra_s) / self.engine.decode.factor
        return max(alone_s, decode_s + factor * max(0.0, added_s))

    def _compute_prompt_parts(self, shape: StepShape) -> _PromptParts:
        requests, engine = shape.decode_requests, self.engine
        phase = engine.prompt_phase(shape.prefill_tokens)
        launched = shape.prefill_tokens + requests > engine.graph_tokens
        launch_s = engine.prompt_layer_s * self.model.layers if launched else 0.0
        layers_s = engine.layer_s * self.model.layers
        prompts_s, _ = self._kernels_s(shape, 0)
        fixed_s, token_s = self._kernels_s(shape, requests) if requests else (0.0, 0.0)
        return _PromptParts(
            alone_s=max(phase.factor * prompts_s, launch_s) + phase.overhead_s + layers_s,
            factor=phase.factor,
            extra_s=engine.decode.overhead_s + layers_s + engine.request_s * requests,
            fixed_s=fixed_s,
            token_s=token_s,
        )

    def _decode_s(self, shape: StepShape) -> float:
        fixed_s, token_s = self._decode(shape.decode_requests)
        return fixed_s + token_s * shape.context_tokens

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        fixed_s, token_s = self._decode(requests)
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        return [fixed_s + token_s * read for read in reads]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """Return the seconds of a handoff. Layer-wise streaming overlaps the prefill of the same tokens."""
        wire = self._wires[1 if same_host else 0]
        prefill_s = 0.0 if wire.streaming == "whole" else self.prefill_s(new_tokens=tokens, cached_tokens=0)
        return wire.exposed_s(
            tokens=tokens, token_bytes=self.kv_token_bytes, layers=self.model.layers, prefill_s=prefill_s
        )

    def on(self, kind: str) -> RooflineCost:
        return self

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of one token's KV."""
        return self.model.kv_token_bytes(self.precision.kv)

    def layer_s(self, tokens: int) -> float:
        """Return the seconds of one layer's kernels without attention and exchange, as profilers measure them."""
        return self._layer.alone_s(tokens)

    def peak_ratios(self, shape: StepShape) -> tuple[float, float]:
        """Return the shares of peak arithmetic and peak memory bandwidth that a step uses."""
        step_s, gpus = self.step_s(shape), self.parallel.gpus
        tokens = shape.prefill_tokens + shape.decode_requests * self.query_tokens
        flops = 2.0 * self.model.active_params * tokens
        flops += self.model.layers * self.model.pair_flops() * shape.prefill_pairs
        read_bytes = self.model.read_params(tokens) * FORMAT_BYTES[self.precision.weights]
        read_bytes += shape.context_tokens * self.kv_token_bytes
        compute_ratio = min(1.0, flops / gpus / step_s / self.hardware.flops(self.precision.weights))
        memory_ratio = min(1.0, read_bytes / gpus / step_s / self.hardware.memory_bytes_per_s)
        return compute_ratio, memory_ratio

    def power_w(self, shape: StepShape) -> float:
        """Return the power draw of the whole worker during a step, in watts."""
        compute_ratio, memory_ratio = self.peak_ratios(shape)
        return self.parallel.gpus * self.hardware.power_w(compute_ratio=compute_ratio, memory_ratio=memory_ratio)

    def _decode(self, requests: int) -> tuple[float, float]:
        """Return the fixed seconds of a decode step, and the seconds per token of context."""
        known = self._decodes_s.get(requests)
        if known is None:
            if len(self._decodes_s) >= MEMO_MAX:
                self._decodes_s.clear()
            known = self._decodes_s[requests] = self._new_decode(requests)
        return known

    def _new_decode(self, requests: int) -> tuple[float, float]:
        engine, layers, pp = self.engine, self.model.layers, self.parallel.pp
        fixed_s = engine.decode.overhead_s + engine.layer_s * layers + engine.request_s * requests
        if requests == 0:
            return fixed_s, 0.0
        token_s = self._attention.context_token_s / min(self.parallel.dp, requests)
        stage_layers = self._layer.stage_ratio * layers
        micro = min(pp, requests)
        queries = requests * self.query_tokens / micro
        attention = self._attention
        merged_s = attention.decode_start_s + attention.merge_s(queries) + attention.share_s(queries)
        stage_s = self._stage_s(0, 1, queries, stage_layers * merged_s)
        kernels_s = pp * stage_s + self._layer.head_s(requests * self.query_tokens / self.parallel.dp)
        return engine.decode.factor * kernels_s + fixed_s, engine.decode.factor * pp * stage_layers * token_s / micro

    def _kernels_s(self, shape: StepShape, requests: int) -> tuple[float, float]:
        """Return the seconds of the kernels of a step with the prompts of `shape` and this many decoding requests.

        The second value is the time per token of context of these requests, which the first one does not contain.
        """
        parallel, attention = self.parallel, self._attention
        tokens, chunks = float(shape.prefill_tokens), max(1, shape.prefill_chunks)
        queries = requests * self.query_tokens
        micro = min(parallel.pp, shape.prefill_tokens + requests)
        ranks = min(parallel.dp, chunks)
        part = {
            "tokens": tokens / micro / ranks,
            "chunks": chunks / ranks,
            "pairs": shape.prefill_pairs / micro / ranks,
        }
        attention_s = attention.prompt_s(**part)
        attention_s += attention.ring_s(tokens=tokens / micro / ranks, beside_s=attention_s)
        attention_s += attention.share_prompts_s(**part)
        if requests:
            attention_s += attention.merge_s(queries / micro) + attention.decode_start_s
            attention_s += attention.share_s(queries / micro)
        layers = self._layer.stage_ratio * self.model.layers
        stage_s = self._stage_s(tokens / micro, chunks, queries / micro, layers * attention_s)
        rounds = micro + parallel.pp - 1
        token_s = attention.context_token_s / micro / min(parallel.dp, max(1, requests))
        return rounds * stage_s + self._layer.head_s((chunks + queries) / parallel.dp), rounds * layers * token_s

    def _stage_s(self, prompt_tokens: float, chunks: int, queries: float, attention_s: float) -> float:
        """Return the seconds of a stage's layers, whose attention takes `attention_s`, and of sending.

        Two micro-batches keep both GPUs and links busy, so the longer of computation and exchange counts. Each reads
        all weights. Source: DeepSeek-V3 (arXiv 2412.19437), 3.4; exchange at the first and last layer is left out.
        """
        least = self.parallel.overlap_tokens_min
        if not least or prompt_tokens + queries < least:
            return self._layers_s(prompt_tokens, chunks, queries) + attention_s
        both_s = 2 * self._layers_s(prompt_tokens / 2, chunks, queries / 2)
        exchange_s = 2 * self._layer.exchange_s(self._rank_tokens(prompt_tokens / 2, chunks, queries / 2))
        return max(both_s - exchange_s + attention_s, exchange_s)

    def _rank_tokens(self, prompt_tokens: float, chunks: int, queries: float) -> float:
        """Return the tokens of one tensor-parallel group. Only cp splits prompts."""
        cp, dp = self.parallel.cp, self.parallel.dp
        return prompt_tokens / cp / min(dp, chunks) + queries / min(dp, max(1.0, queries))

    def _layers_s(self, prompt_tokens: float, chunks: int, queries: float) -> float:
        """Return the seconds of a stage's layers without attention, and of sending."""
        ranked = self._rank_tokens(prompt_tokens, chunks, queries)
        key = (ranked, prompt_tokens + queries)
        known = self._stages_s.get(key)
        if known is None:
            if len(self._stages_s) >= MEMO_MAX:
                self._stages_s.clear()
            known = self._layer.stage_s(*key) + self._layer.send_s(ranked)
            self._stages_s[key] = known
        return known
