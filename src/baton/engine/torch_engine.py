"""StepEngine on torch: real models, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.core.step import Slice, Step, StepResult
from baton.core.types import BlockId, RequestId, Sampling, TokenLogprob
from baton.engine.kernels.backend import AttentionBackend
from baton.engine.kernels.paged import PagedKV, Row
from baton.engine.llama import Llama
from baton.engine.sampler import sample, token_logprob
from baton.kv.layout import KVLayout

LOGPROB_ROWS = 64
"""Prompt log probabilities are computed for so many positions at a time: a vocabulary of float32 each."""


class TorchEngine:
    """Runs a model over an arena's blocks. Keeps nothing between steps but weights."""

    def __init__(self, model: Llama, kv: PagedKV, backend: AttentionBackend, device: torch.device) -> None:
        self.layout: KVLayout = kv.layout
        self._model = model
        self._kv = kv
        self._backend = backend
        self._device = device

    def execute(self, step: Step) -> StepResult:
        """Compute all slices in one ragged batch."""
        return self._execute(step, self._kv) if step.slices else StepResult()

    def warm_up(self) -> None:
        """Touch weights and code paths once, before the first request. Writes into memory of its own, not the arena."""
        scratch = torch.zeros(self.layout.block_bytes, dtype=torch.uint8, device=self._device)
        part = Slice(
            request_id=RequestId("warm-up"),
            tokens=[0] * self.layout.block_tokens,
            start=0,
            count=self.layout.block_tokens,
            block_table=[BlockId(0)],
            sample=True,
            sampling=Sampling(temperature=1.0, top_p=0.9),
            prompt_tokens=self.layout.block_tokens,
        )
        TorchEngine(self._model, PagedKV(scratch, self.layout), self._backend, self._device).execute(Step((part,)))

    def _sample(
        self, slices: tuple[Slice, ...], rows: list[Row], hidden: Tensor
    ) -> list[tuple[int, TokenLogprob | None]]:
        asking = [(part, row) for part, row in zip(slices, rows, strict=True) if part.sample]
        if not asking:
            return []
        last = torch.tensor([row.first + row.count - 1 for _, row in asking], device=self._device)
        return sample(self._model.logits(hidden[last]), [part for part, _ in asking])

    def _prompt_logprobs(self, part: Slice, row: Row, hidden: Tensor) -> Iterator[TokenLogprob]:
        """Yield those of prompt tokens start + 1 .. start + count: each is predicted by the token before it."""
        count = min(row.count, part.prompt_tokens - 1 - part.start)
        for first in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - first)
            logits = self._model.logits(hidden[row.first + first : row.first + first + size])
            for offset in range(size):
                token = part.tokens[part.start + first + offset + 1]
                yield token_logprob(logits[offset], token, part.sampling.top_logprobs or 0)
