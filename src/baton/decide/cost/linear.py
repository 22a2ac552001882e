"""A cost model that is linear in tokens, requests and context: sufficient to rank choices, and easy to fit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Struct

from baton.core.types import StepShape, prefill_pairs
from baton.core.validation import Price, Range, Seconds

_ARRAY_STEPS_MIN = 64
"""Runs of at least this many steps use an array, which is faster than a loop. Both give the same numbers."""


Overhead = Annotated[float, Range(above=0.0, such_as="seconds, such as 0.039: every step takes a while")]


class LinearCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time: overhead + prompt tokens + attention pairs + decoding requests + context, each times its price.

    The defaults are SmolLM2-135M in float32 on one CPU core, rounded from `benchmarks/results/engine-steps.json`.
    """

    step_overhead_s: Overhead = 0.039
    """Time of an empty step, such as for reading the weights, which any batch needs once."""
    prefill_token_s: Price = 0.0023
    prefill_pair_s: Price = 0.00000086
    """Time per (query, key) pair of prompt attention."""
    decode_request_s: Price = 0.0053
    context_token_s: Price = 0.000004
    """Time to read one token's KV in attention."""
    handoff_local_s: Seconds = 0.0005
    handoff_token_s: Price = 0.00002
    """Time per token between hosts. A handoff on one host moves no bytes."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        if new_tokens == 0:
            return 0.0
        pairs = prefill_pairs(new_tokens, cached_tokens)
        return self.step_overhead_s + (self.prefill_token_s * new_tokens + self.prefill_pair_s * pairs)

    def step_s(self, shape: StepShape) -> float:
        decode_s = self.decode_request_s * shape.decode_requests + self.context_token_s * shape.context_tokens
        if not shape.prefill_tokens:
            return self.step_overhead_s + decode_s
        prefill_s = self.prefill_token_s * shape.prefill_tokens + self.prefill_pair_s * shape.prefill_pairs
        return self.step_overhead_s + prefill_s + decode_s

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        fixed_s, token_s, requests_s = self.step_overhead_s, self.context_token_s, self.decode_request_s * requests
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        if steps >= _ARRAY_STEPS_MIN:
            steps_s = token_s * np.arange(reads.start, reads.stop, reads.step)
            steps_s += requests_s
            steps_s += fixed_s
            return array("d", steps_s.tobytes())
        return [fixed_s + (requests_s + token_s * read) for read in reads]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return self.handoff_local_s + (0.0 if same_host else self.handoff_token_s * tokens)

    def on(self, kind: str) -> LinearCost:
        return self
