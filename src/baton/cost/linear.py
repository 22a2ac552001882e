"""A cost model that is linear in tokens, requests and context: enough to rank choices, quick to fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Step time = overhead + prompt tokens + decoding requests + context read, each with its own price.

    The defaults are SmolLM2-135M in float32 on one CPU core, rounded from `benchmarks/results/engine-steps.json`.
    """

    step_overhead_s: float = 0.039
    """A step with nothing in it: the weights are read once whatever the batch."""
    prefill_token_s: float = 0.0025
    decode_request_s: float = 0.0053
    context_token_s: float = 0.000004
    """Reading one token's KV in attention."""
    handoff_local_s: float = 0.0005
    handoff_token_s: float = 0.00002
    """Only between hosts: on one host no byte moves."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """See `CostModel.prefill_s`."""
        if new_tokens == 0:
            return 0.0
        return self.step_s(prefill_tokens=new_tokens, decode_requests=0, context_tokens=cached_tokens + new_tokens // 2)

    def step_s(self, *, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """See `CostModel.step_s`."""
        return (
            self.step_overhead_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_request_s * decode_requests
            + self.context_token_s * context_tokens
        )

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """See `CostModel.handoff_s`."""
        return self.handoff_local_s + (0.0 if same_host else self.handoff_token_s * tokens)
