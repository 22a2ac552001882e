"""StepEngine on torch: real models, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.sampler import Drawn, Numbers, drawn_rows, sample_drafted, token_logprob
from baton.compute.torch.kernels.paged_kv import PagedKV, Row, ragged_rows, scratch_block
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.step_runner import StepRunner
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, RequestId, Sampling, TokenLogprob
from baton.decide.kv.layout import KVLayout

LOGPROB_ROWS = 64
"""Prompt log probabilities are computed for so many positions at a time: a vocabulary of float32 each."""


class TorchEngine:
    """Runs a model over an arena's blocks. Keeps nothing between steps but weights."""

    def __init__(
        self, model: Decoder, kv: PagedKV, runner: StepRunner, device: torch.device, layout: KVLayout | None = None
    ) -> None:
        """layout: the arena's, where `kv` is one rank's part of it. None: it is that of `kv`."""
        self.layout: KVLayout = layout or kv.layout
        self.progress = model.progress
        self._model = model
        self._kv = kv
        self._runner = runner
        self._device = device

    def execute(self, step: Step) -> StepResult:
        """Compute all slices in one ragged batch."""
        return self._execute(step, self._kv) if step.slices else StepResult()

    def warm_up(self) -> None:
        """Touch weights and code paths once, before the first request. Writes into memory of its own, not the arena."""
        scratch = scratch_block(self._kv.layout, self._device)
        tokens = [0] * self.layout.block_tokens
        for start, count in ((0, len(tokens) - 1), (len(tokens) - 1, 1)):  # a chunk, then a token: both kernels
            part = Slice(
                request_id=RequestId("warm-up"),
                tokens=tokens[: start + count],
                start=start,
                count=count,
                block_table=[BlockId(0)],
                sample=True,
                sampling=Sampling(temperature=1.0, top_p=0.9),
                prompt_tokens=start + count,
            )
            if count:
                self._execute(Step((part,)), scratch)

    @torch.inference_mode()
    def _execute(self, step: Step, kv: PagedKV) -> StepResult:
        tokens = [token for part in step.slices for token in part.tokens[part.start : part.start + part.count]]
        rows = ragged_rows(step.slices, self.layout)
        hidden = self._runner.hidden(tokens, rows, kv)
        drawn = iter(self._sample(step.slices, rows, hidden))
        results: list[SliceResult] = []
        for part, row in zip(step.slices, rows, strict=True):
            (token, logprob), *further = next(drawn) if part.sample else [(None, None)]
            prompt = tuple(self._prompt_logprobs(part, row, hidden)) if part.sampling.prompt_logprobs else ()
            vector = self._embedding(row, hidden) if part.sample and part.sampling.embedding else b""
            results.append(
                SliceResult(
                    token=token, logprob=logprob, prompt_logprobs=prompt, embedding=vector, further=tuple(further)
                )
            )
        return StepResult(tuple(results))

    def _sample(self, slices: tuple[Slice, ...], rows: list[Row], hidden: Tensor) -> list[list[Drawn]]:
        asking = [(part, row) for part, row in zip(slices, rows, strict=True) if part.sample]
        if not asking:
            return []
        wanted = [index for part, row in asking for index in drawn_rows(part, row.first)]
        return sample_drafted(self._logits(hidden, wanted), [part for part, _ in asking])

    def _logits(self, hidden: Tensor, picked: Sequence[int]) -> Numbers:
        """Project rows to the vocabulary: [picked, vocab]. What lies in host memory is numpy's to draw from."""
        logits = self._runner.logits(hidden, picked)
        return logits if logits.is_cuda else logits.numpy()

    def _embedding(self, row: Row, hidden: Tensor) -> bytes:
        """Return the last token's final hidden state, as long as 1: it has seen the whole prompt."""
        last = row.first + row.count - 1
        vector = functional.normalize(self._model.final(hidden[last : last + 1])[0].float(), dim=0)
        return vector.cpu().numpy().astype("<f4").tobytes()

    def _prompt_logprobs(self, part: Slice, row: Row, hidden: Tensor) -> Iterator[TokenLogprob]:
        """Yield those of prompt tokens start + 1 .. start + count: each is predicted by the token before it."""
        count = min(row.count, part.prompt_tokens - 1 - part.start)
        for first in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - first)
            logits = self._logits(hidden, range(row.first + first, row.first + first + size))
            for offset in range(size):
                token = part.tokens[part.start + first + offset + 1]
                yield token_logprob(logits[offset], token, part.sampling.top_logprobs or 0)
