"""The step engine on the native library. A step is one call; a request's result does not depend on other requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from baton.compute.models.model_config import ModelConfig
from baton.compute.models.rope import inverse_frequencies
from baton.compute.native.library import NativeLibrary, NativeStep
from baton.compute.sampler import Drawn, HostSampler, drawn_rows
from baton.compute.step_engine import Progress
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, RequestId, Sampling, TokenLogprob
from baton.decide.kv.layout import KVLayout

LOGPROB_ROWS = 64
"""Prompt positions whose log probabilities are computed at a time. Each needs the logits of a whole vocabulary."""
ANGLE_POSITIONS = 4096
"""Positions per run of computed angles. Runs always start at the same positions, so angles have the same bits."""


class NativeEngine:
    """Implements `StepEngine`. Owns a handle of the library, and keeps only weights between steps."""

    def __init__(
        self, library: NativeLibrary, handle: int, config: ModelConfig, layout: KVLayout, memory: memoryview
    ) -> None:
        """Take ownership of `handle`. memory: the whole arena, writable."""
        self.layout = layout
        self.progress = Progress()
        self._library = library
        self.handle = handle
        self._config = config
        self._arena = np.frombuffer(memory, dtype=np.uint8)
        self._angles = AngleTable(config)
        self._sampler = HostSampler()
        self._logits_buffer = np.empty(0, dtype=np.float32)
        self._spill = np.empty(0, dtype=np.uint8)
        self._set_arena(self._arena)

    def use_spill(self, memory: memoryview) -> None:
        """Read spilled blocks from this memory: [layers, slots, ...], as `SpillMemory` has it."""
        self._spill = np.frombuffer(memory, dtype=np.uint8)  # kept: the library has only its address
        slots = self._spill.size // self.layout.block_bytes
        self._library.set_spill(self.handle, self._spill.ctypes.data, slots)

    def __del__(self) -> None:
        self._library.free(self.handle)

    def execute(self, step: Step) -> StepResult:
        """Compute all slices in one call. Raises ModelError for a token or block that does not exist."""
        if not step.slices:
            return StepResult()
        firsts = self._forward(step.slices)
        drawn = iter(self._sample(step.slices, firsts))
        results: list[SliceResult] = []
        for part, first in zip(step.slices, firsts, strict=True):
            found, failure = next(drawn) if part.sample else ([], "")
            token, logprob = found[0] if found else (None, None)
            prompt = tuple(self._prompt_logprobs(part, first)) if part.sampling.prompt_logprobs else ()
            vector = self._embedding(first + part.count - 1) if part.sample and part.sampling.embedding else b""
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

    def warm_up(self) -> None:
        """Run a step once, before the first request. Writes to scratch memory, not to the arena."""
        scratch = np.zeros(self.layout.block_bytes, dtype=np.uint8)
        tokens = [0] * self.layout.block_tokens
        part = Slice(
            request_id=RequestId("warm-up"),
            tokens=tokens,
            start=0,
            count=len(tokens),
            block_table=[BlockId(0)],
            sample=True,
            sampling=Sampling(temperature=1.0, top_p=0.9),
            prompt_tokens=len(tokens),
        )
        self._set_arena(scratch)
        try:
            self.execute(Step((part,)))
        finally:
            self._set_arena(self._arena)

    def add_guests(self, cores: Sequence[int]) -> None:
        """Allow steps to use idle cores of other workers. Cores that the system refuses are not used."""
        guests = self._library.guests(self.handle)
        for core in cores:
            guests.add_guest(core)

    def _set_arena(self, arena: np.ndarray) -> None:
        self._library.set_arena(self.handle, arena.ctypes.data, arena.size // self.layout.block_bytes)

    def _forward(self, slices: Sequence[Slice]) -> list[int]:
        """Run the step, and return the index of the first row of each slice."""
        counts = _int32([part.count for part in slices])
        tables = [part.block_table[: self._blocks(part)] for part in slices]
        tokens = _int32([token for part in slices for token in part.tokens[part.start : part.start + part.count]])
        starts = _int32([part.start for part in slices])
        blocks = _int32([block for table in tables for block in table])
        block_counts = _int32([len(table) for table in tables])
        angles = self._angles.up_to(max(part.start + part.count for part in slices))
        read = _int32([_read_tokens(part) for part in slices])
        arrays = (tokens, counts, starts, blocks, block_counts, angles)
        addresses = (*(array.ctypes.data for array in arrays), self.progress.address, read.ctypes.data)
        self._library.forward(self.handle, NativeStep(len(slices), len(tokens), len(blocks), len(angles), *addresses))
        return (np.cumsum(counts) - counts).tolist()

    def _blocks(self, part: Slice) -> int:
        return -(-(part.start + part.count) // self.layout.block_tokens)

    def _sample(self, slices: Sequence[Slice], firsts: Sequence[int]) -> list[tuple[list[Drawn], str]]:
        """Return for each slice that samples: its tokens, and the reason why it fails (empty: it does not)."""
        sampled = [(part, first) for part, first in zip(slices, firsts, strict=True) if part.sample]
        if not sampled:
            return []
        rows = [row for part, first in sampled for row in drawn_rows(part, first)]
        return self._sampler.draw(self._logits(rows), [part for part, _ in sampled])

    def _logits(self, rows: Sequence[int]) -> np.ndarray:
        """Return the logits of rows of the last step: [rows, vocab], float32, valid until the next call."""
        indices = _int32(rows)
        vocab = self._config.vocab_tokens
        if self._logits_buffer.size < len(rows) * vocab:
            self._logits_buffer = np.empty(len(rows) * vocab, dtype=np.float32)
        logits = self._logits_buffer[: len(rows) * vocab].reshape(len(rows), vocab)
        self._library.project(self.handle, indices.ctypes.data, len(rows), logits.ctypes.data)
        return logits

    def _embedding(self, row: int) -> bytes:
        """Return the final hidden state [hidden] of one row of the last step, normalized to length 1."""
        indices, hidden = _int32([row]), np.empty(self._config.hidden, dtype="<f4")
        self._library.read(self.handle, indices.ctypes.data, 1, hidden.ctypes.data)
        return (hidden / np.linalg.norm(hidden)).tobytes()

    def _prompt_logprobs(self, part: Slice, first: int) -> Iterator[TokenLogprob]:
        """Yield the log probability of each prompt token that this slice's rows predict: from position start + 1 on."""
        count = min(part.count, part.prompt_tokens - 1 - part.start)
        for begin in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - begin)
            logits = self._logits(range(first + begin, first + begin + size))
            tokens = part.tokens[part.start + begin + 1 : part.start + begin + 1 + size]
            yield from self._sampler.logprobs(logits, tokens, part.sampling.top_logprobs or 0)


class AngleTable:
    """A growing table of cosines and sines: [positions, rotary_dim], float32, cosines in the first half."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config)  # [rotary_dim / 2]
        self._factor = np.float32(config.rope.attention_factor)
        self._table = np.empty((0, config.rotary_dim), dtype=np.float32)

    def up_to(self, positions: int) -> np.ndarray:
        """Return the table with at least this many positions."""
        while len(self._table) < positions:
            start = len(self._table)
            self._table = np.concatenate((self._table, self._run(start, start + ANGLE_POSITIONS)))
        return self._table

    def _run(self, start: int, end: int) -> np.ndarray:
        """Return cosines and sines for positions [start, end).

        Angles are float32 products, as in training. Their cosines and sines are computed in float64 and then rounded.
        """
        positions = np.arange(start, end, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        return np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32) * self._factor


def _read_tokens(part: Slice) -> int:
    """Return how many of the slice's last tokens the engine reads hidden states of."""
    if part.sampling.prompt_logprobs:
        return part.count
    return 1 + part.drafts if part.sample else 0


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
