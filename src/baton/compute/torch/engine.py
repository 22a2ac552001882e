"""The step engine on PyTorch, for a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.sampler import Drawn, HostSampler, Sampler, drawn_rows
from baton.compute.torch.kernels.paged_kv import BlockTables, PagedKV, Row, scratch_block
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.sampler import DeviceSampler
from baton.compute.torch.step_runner import StepRunner
from baton.core.errors import DeviceError, StepMemoryError
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, RequestId, Sampling, TokenLogprob
from baton.decide.kv.layout import KVLayout


class KernelQueue(Protocol):
    """The kernels that this process has launched on its device, in order."""

    def wait(self) -> None:
        """Return when every launched kernel has ended. Raises DeviceError if a kernel or the device has failed."""
        ...


class HostQueue:
    """Implements `KernelQueue` for a CPU, where every operation returns after its last write."""

    def wait(self) -> None:
        return


class CudaQueue:
    """Implements `KernelQueue` for the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def wait(self) -> None:
        # CUDA reports a kernel's failure (device assert, illegal address) at a later call, and every call after it
        # fails too: the context of this process is lost.
        try:
            self._event.record(torch.cuda.current_stream(self._device))
            self._event.synchronize()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise DeviceError(f"{self._device} can no longer compute in this process: {reason}") from error


def queue_of(device: torch.device) -> KernelQueue:
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


LOGPROB_ROWS = 64
"""Prompt positions whose log probabilities are computed at a time. Each needs the logits of a whole vocabulary."""

MEMORY_ERRORS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of failed allocations that are no OutOfMemoryError: from Triton, from cuBLAS, and on a CPU."""


class TorchEngine:
    """Implements `StepEngine`: runs a model over an arena's blocks. Keeps only weights between steps."""

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        runner: StepRunner,
        device: torch.device,
        *,
        layout: KVLayout | None = None,
        queue: KernelQueue | None = None,
    ) -> None:
        """layout: the layout of the whole arena. None: the layout of `kv`; one rank holds only a part of the arena.

        queue: runs the kernels of `device`. None: the queue of the device. Tests pass a queue that delays kernels.
        """
        self.layout: KVLayout = layout or kv.layout
        self.progress = model.progress
        self._model = model
        self._kv = kv
        self._runner = runner
        self._device = device
        self._queue = queue or queue_of(device)
        self._tables = BlockTables()
        self._sampler: Sampler = DeviceSampler() if device.type == "cuda" else HostSampler()

    def execute(self, step: Step) -> StepResult:
        """Compute all slices in one ragged batch.

        No kernel of the step runs after the return, not even after an error: the caller publishes the blocks of this
        step to other processes, or gives them to another request.
        """
        return self._execute(step, self._kv) if step.slices else StepResult()

    def warm_up(self) -> None:
        """Run a chunk and a decode step, and capture all graphs, before the first request. The arena is not written."""
        scratch = scratch_block(self._kv)
        tokens = [0] * self.layout.block_tokens
        for start, count in (
            (0, len(tokens) - 1),
            (len(tokens) - 1, 1),
        ):  # a chunk, then one token
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
        self._runner.prepare()
        self._queue.wait()

    def _execute(self, step: Step, kv: PagedKV) -> StepResult:
        self._check_tokens(step.slices)
        try:
            return self._compute(step, kv)
        except (RuntimeError, MemoryError) as error:
            reason = _out_of_memory(error)
            if not reason:
                raise
            raise StepMemoryError(
                f"a step of {step.tokens} tokens in {len(step.slices)} requests does not fit into the free memory of "
                f"{self._device} ({reason}); lower batch.step_tokens_max or batch.requests_max, or set a lower kv.bytes"
            ) from error
        finally:
            self._queue.wait()

    @torch.inference_mode()
    def _compute(self, step: Step, kv: PagedKV) -> StepResult:
        tokens = [token for part in step.slices for token in part.tokens[part.start : part.start + part.count]]
        rows = self._tables.rows(step.slices, self.layout)
        hidden = self._runner.hidden(tokens, rows, kv)
        drawn = iter(self._sample(step.slices, rows, hidden))
        results: list[SliceResult] = []
        for part, row in zip(step.slices, rows, strict=True):
            found, failure = next(drawn) if part.sample else ([], "")
            token, logprob = found[0] if found else (None, None)
            prompt = tuple(self._prompt_logprobs(part, row, hidden)) if part.sampling.prompt_logprobs else ()
            vector = self._embedding(row, hidden) if part.sample and part.sampling.embedding else b""
            results.append(
                SliceResult(
                    token=token,
                    failure=failure,
                    logprob=logprob,
                    prompt_logprobs=prompt,
                    embedding=vector,
                    further=tuple(found[1:]),
                )
            )
        return StepResult(tuple(results))

    def _check_tokens(self, slices: Sequence[Slice]) -> None:
        """Raise ValueError for a token outside of the vocabulary: on a GPU it would end this process."""
        size = self._model.config.vocab_tokens
        for part in slices:
            new = part.tokens[part.start : part.start + part.count]
            worst = min(new) if min(new) < 0 else max(new)
            if not 0 <= worst < size:
                raise ValueError(
                    f"token {worst} of request {part.request_id} is no id of the vocabulary (0 to {size - 1})"
                )

    def _sample(self, slices: tuple[Slice, ...], rows: list[Row], hidden: Tensor) -> list[tuple[list[Drawn], str]]:
        """Return for each slice that samples: its tokens, and the reason why it fails (empty: it does not)."""
        sampled = [(part, row) for part, row in zip(slices, rows, strict=True) if part.sample]
        if not sampled:
            return []
        picked = [index for part, row in sampled for index in drawn_rows(part, row.first)]
        return self._sampler.draw(self._runner.logits(hidden, picked), [part for part, _ in sampled])

    def _embedding(self, row: Row, hidden: Tensor) -> bytes:
        """Return the last token's final hidden state [hidden], normalized to length 1, as little-endian float32."""
        last = row.first + row.count - 1
        vector = functional.normalize(self._model.final(hidden[last : last + 1])[0].float(), dim=0)
        return vector.cpu().numpy().astype("<f4").tobytes()

    def _prompt_logprobs(self, part: Slice, row: Row, hidden: Tensor) -> Iterator[TokenLogprob]:
        """Yield the log probability of each prompt token that this slice's rows predict: from position start + 1 on."""
        count = min(row.count, part.prompt_tokens - 1 - part.start)
        for first in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - first)
            logits = self._runner.logits(hidden, range(row.first + first, row.first + first + size))
            tokens = part.tokens[part.start + first + 1 : part.start + first + 1 + size]
            yield from self._sampler.logprobs(logits, tokens, part.sampling.top_logprobs or 0)


def _out_of_memory(error: BaseException | None) -> str:
    """Return the first line of the failed allocation behind an error. Empty: the error has another cause.

    An allocation that fails during a graph capture is hidden behind the error that ends the capture.
    """
    while error is not None:
        text = str(error).strip()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in MEMORY_ERRORS):
            return text.splitlines()[0] if text else type(error).__name__
        error = error.__cause__ or error.__context__
    return ""
