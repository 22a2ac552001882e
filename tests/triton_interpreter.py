"""Triton's kernels in its interpreter, as an attention backend for CPU tensors.

The interpreter has to be chosen before triton is first imported, so the kernels run in a process of their own. As a
program, this module is that process: it answers each call on standard input with a result on standard output.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import torch
from torch import Tensor

from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.decide.kv.layout import KVLayout

ROOT = Path(__file__).resolve().parents[1]
LATENT_ROPE = 64
"""Last dimensions of a latent vector that belong to its key only."""


@dataclass(frozen=True, slots=True)
class InterpretedPlan:
    """Implements `AttentionPlan` in the interpreter's process."""

    backend: InterpretedBackend
    rows: Sequence[Row]
    kv: PagedKV

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        rows = [(row.first, row.count, row.start, row.blocks) for row in self.rows]
        layout = msgspec.structs.asdict(self.kv.layout)
        return self.backend.call((layout, self.kv.data, rows, layer, queries, window))


class InterpretedBackend:
    """Implements `AttentionBackend` with a backend of Triton in the interpreter. Call `close` at the end."""

    def __init__(self, form: Literal["triton", "fused"] = "triton") -> None:
        command = [sys.executable, "-m", "tests.triton_interpreter", form]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> InterpretedPlan:
        return InterpretedPlan(self, rows, kv)

    def call(self, given: Any) -> Tensor:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _put(self._process.stdin, given)
        return _take(self._process.stdout)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _put(stream: IO[bytes], given: Any) -> None:
    packed = io.BytesIO()
    torch.save(given, packed)
    stream.write(len(packed.getvalue()).to_bytes(8, "little") + packed.getvalue())
    stream.flush()


def _take(stream: IO[bytes]) -> Any:
    """Return what `_put` wrote. Raises EOFError at the end of the stream."""
    size = stream.read(8)
    if len(size) < 8:
        raise EOFError("the other process has ended")
    return torch.load(io.BytesIO(stream.read(int.from_bytes(size, "little"))), weights_only=True)


def main() -> None:
    from baton.compute.triton.fused import FusedBackend
    from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel

    while True:
        try:
            layout, data, rows, layer, queries, window = _take(sys.stdin.buffer)
        except EOFError:
            return
        shape = KVLayout(**layout)
        kv = PagedKV(data.view(-1).view(torch.uint8), shape)
        rope_dim = LATENT_ROPE if shape.planes == 1 else 0
        kernel = TritonDecodeKernel(products=torch.float32, rope_dim=rope_dim)
        backend = FusedBackend(kernel, programs=8) if sys.argv[1] == "fused" else TritonBackend(kernel)
        _put(sys.stdout.buffer, backend.plan([Row(*row) for row in rows], kv).run(layer, queries, window))


if __name__ == "__main__":
    main()
