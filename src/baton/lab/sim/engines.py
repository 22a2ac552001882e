"""The interface of engines of simulated workers, and an engine that knows only the lengths of answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from msgspec.structs import replace

from baton.compute.hash_engine import hash_card
from baton.core.copies import LayerSpan
from baton.core.spill import SpillBlocks
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, Request, RequestId
from baton.decide.control.decode_run import DecodeRun
from baton.decide.kv.layout import KVLayout

STOP_TOKEN = 0
"""Ends a text."""
_NO_TOKEN, _STOP = SliceResult(), SliceResult(token=STOP_TOKEN)


class DecodePredictor(Protocol):
    """Predicts decode steps, so that the simulator can skip them instead of computing each one."""

    def ends(self, run: DecodeRun) -> tuple[int, Mapping[RequestId, int]]:
        """Return the number of steps until a request of the run ends, at most all steps of the run.

        Return also the requests that the last of these steps ends, each with its final token.
        """
        ...

    def token(self, request: Request) -> array[int]:
        """Return an array of the one token that the request decodes in every step but its last."""
        ...


class SimEngine(Protocol):
    """Computes a simulated worker's steps."""

    @property
    def predictor(self) -> DecodePredictor | None:
        """The engine's prediction of decode steps. None: the engine has to compute every step."""
        ...

    def execute(self, step: Step) -> StepResult: ...

    @property
    def layers(self) -> int:
        """Number of layers of the model, which a step computes one after the other."""
        ...

    def compute_layers(self, step: Step, end: int) -> None:
        """Write the KV of the step's layers before `end`."""
        ...

    def corrupt_kv(self, step: Step) -> None:
        """Overwrite the KV of the step's tokens with garbage, as if the process died while it wrote them."""
        ...

    def spill(self, order: SpillBlocks) -> None:
        """Copy blocks to the spill space."""
        ...

    def kv_of(self, table: Sequence[BlockId], slot: int, layers: LayerSpan | None = None) -> bytes:
        """Return one token's KV, for a copy to another host. `slot` counts tokens from the start of the table."""
        ...

    def write(self, table: Sequence[BlockId], slot: int, kv: bytes, layers: LayerSpan | None = None) -> None:
        """Write one token's KV that `kv_of` of another host's engine returned for the same layers."""
        ...


def content_layout(block_tokens: int, layers: int) -> KVLayout:
    """Return the KV layout of the hash model in a simulated arena, with this number of layers."""
    return replace(hash_card(), layers=layers).layout(block_tokens=block_tokens, dtype="uint8")


@dataclass(frozen=True, slots=True)
class LengthEngine:
    """Emits placeholder tokens up to a request's output length in the trace, which is hidden from the policies."""

    output_tokens: Mapping[RequestId, int]
    jumps: bool = True
    """Skip decode steps in closed form. False plays every step, with the same results, but slower."""
    layers: int = 1
    """Number of layers of the model, which a step computes one after the other."""

    @property
    def predictor(self) -> DecodePredictor | None:
        return self if self.jumps else None

    def ends(self, run: DecodeRun) -> tuple[int, Mapping[RequestId, int]]:
        steps = run.steps
        ended: dict[RequestId, int] = {}
        for lane in run.lanes:
            request = lane.request
            left = max(1, self.output_tokens[request.id] + request.prompt_tokens - len(lane.tokens))
            if left < steps:
                steps, ended = left, {request.id: STOP_TOKEN}
            elif left == steps:
                ended[request.id] = STOP_TOKEN
        return steps, ended

    def token(self, request: Request) -> array[int]:
        """Return a token that depends on the request, so that two answers to one prompt do not share blocks."""
        return array("I", (_token(request.id),))

    def execute(self, step: Step) -> StepResult:
        return StepResult([self._result(part) for part in step.slices])

    def compute_layers(self, step: Step, end: int) -> None:
        """Do nothing: this engine stores no KV."""

    def corrupt_kv(self, step: Step) -> None:
        """Do nothing: this engine stores no KV."""

    def spill(self, order: SpillBlocks) -> None:
        """Do nothing: this engine stores no KV."""

    def kv_of(self, table: Sequence[BlockId], slot: int, layers: LayerSpan | None = None) -> bytes:
        """Return no bytes: this engine stores no KV."""
        return b""

    def write(self, table: Sequence[BlockId], slot: int, kv: bytes, layers: LayerSpan | None = None) -> None:
        """Do nothing: this engine stores no KV."""

    def _result(self, part: Slice) -> SliceResult:
        if not part.sample:
            return _NO_TOKEN
        length = part.start + part.count
        last = length + 1 - part.prompt_tokens >= self.output_tokens[part.request_id]
        return _STOP if last else SliceResult(token=_token(part.request_id))


def _token(request_id: RequestId) -> int:
    return 1 + crc32(request_id.encode()) % 1_000_003
