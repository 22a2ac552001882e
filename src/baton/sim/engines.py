"""What computes tokens in the simulator: the hash engine over plain bytes, or a stand-in that knows only lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, Request, RequestId
from baton.engine.hash_engine import HashEngine, hash_card
from baton.kv.layout import KVLayout

STOP_TOKEN = 0
"""Ends a text in both engines."""
_FRESH_BYTE = 0xEE
_SCRIBBLE_BYTE = 0xDD
_NO_TOKEN = SliceResult()


class SimEngine(Protocol):
    """Computes a simulated worker's steps."""

    def execute(self, step: Step) -> StepResult:
        """See `StepEngine.execute`."""
        ...

    def scribble(self, step: Step) -> None:
        """Leave the step's own slots as a process leaves them that was killed while it wrote them."""
        ...

    def bytes_of(self, block: BlockId) -> bytes:
        """Read a block's KV, for a copy to another host."""
        ...

    def write(self, block: BlockId, kv: bytes) -> None:
        """Write what another host's engine has read."""
        ...


class ContentEngine:
    """The real hash engine: any lost, swapped or stale block changes the text (INV-8). All workers share one arena."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        self._layout: KVLayout = hash_card().layout(block_tokens=block_tokens, dtype="uint8")
        self._arena = bytearray([_FRESH_BYTE]) * (blocks * self._layout.block_bytes)
        self._engine = HashEngine(self._layout, memoryview(self._arena))

    def execute(self, step: Step) -> StepResult:
        """See `StepEngine.execute`."""
        return self._engine.execute(step)

    def scribble(self, step: Step) -> None:
        """See `SimEngine.scribble`. The hash model has one layer and one head: K of a block's tokens, then V."""
        width = self._layout.token_bytes // 2
        plane = width * self._layout.block_tokens
        for part in step.slices:
            for position in range(part.start, part.start + part.count):
                block, slot = divmod(position, self._layout.block_tokens)
                start = part.block_table[block] * self._layout.block_bytes + slot * width
                for at in (start, start + plane):
                    self._arena[at : at + width] = bytes([_SCRIBBLE_BYTE]) * width

    def bytes_of(self, block: BlockId) -> bytes:
        """See `SimEngine.bytes_of`."""
        size = self._layout.block_bytes
        return bytes(self._arena[block * size : (block + 1) * size])

    def write(self, block: BlockId, kv: bytes) -> None:
        """See `SimEngine.write`."""
        size = self._layout.block_bytes
        self._arena[block * size : (block + 1) * size] = kv


@dataclass(frozen=True, slots=True)
class LengthEngine:
    """Emits tokens that mean nothing until the request's true output length, which nobody else knows."""

    output_tokens: Mapping[RequestId, int]

    def execute(self, step: Step) -> StepResult:
        """See `StepEngine.execute`."""
        return StepResult([self._result(part) for part in step.slices])

    def scribble(self, step: Step) -> None:
        """There are no bytes."""

    def bytes_of(self, block: BlockId) -> bytes:
        """There are none."""
        return b""

    def write(self, block: BlockId, kv: bytes) -> None:
        """There are none."""

    def _result(self, part: Slice) -> SliceResult:
        if not part.sample:
            return _NO_TOKEN
        length = part.start + part.count
        last = length + 1 - part.prompt_tokens >= self.output_tokens[part.request_id]
        return SliceResult(token=STOP_TOKEN if last else 1 + (part.tokens[0] + length) % 1_000_003)


def text_alone(request: Request, prompt: Sequence[int], *, block_tokens: int = 16) -> list[int]:
    """Compute a request's whole output with nobody else there: no batch, no scheduler, no shared block.

    The oracle of INV-8, as simple as it can be: the prompt in one step, then token after token.
    """
    tokens_max = len(prompt) + request.output_tokens_max
    blocks = -(-tokens_max // block_tokens)
    engine = ContentEngine(blocks=blocks, block_tokens=block_tokens)
    table = [BlockId(block) for block in range(blocks)]
    tokens, start = list(prompt), 0
    while len(tokens) < tokens_max:
        part = Slice(
            request_id=request.id,
            tokens=tokens,
            start=start,
            count=len(tokens) - start,
            block_table=table,
            sample=True,
            sampling=request.sampling,
            prompt_tokens=len(prompt),
        )
        token = engine.execute(Step((part,))).slices[0].token
        assert token is not None
        start = len(tokens)
        tokens.append(token)
        if token in request.sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]
