"""Measure attention of mixed steps on a GPU: chunks of prompts and decoding requests, in one launch and in several.

python benchmarks/gpu_fused.py [--seconds 120] [--rehearse]      (by `make gpu`, which sets PYTHONPATH)

Forms: `serial` and `serial_persistent` launch chunks, then decoding; `streams` launches both on a stream each; `fused`
takes both in one launch, `fused_one_pool` with tickets that all multiprocessors share. `chunks` and `decodes` are the
parts of `serial`. A CUDA graph replays one layer over each of several sets of blocks. `floor`: the share of the time
that the measured copy and matmul rates allow if both are used at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import record
import torch
from _gpu import Budget, Ceilings, arguments, ceilings, described, missing, random_kv, replayed
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionPlan
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.decide.kv.layout import KVDtype, KVLayout
from tests.attention_cases import DECODE_LAYERS

BLOCK_TOKENS = 16
SETS = DECODE_LAYERS
"""Sets of blocks that a graph reads in turn: the layers of one arena."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A step. chunks: new tokens, and tokens before them. decodes: tokens of each request, the new one included."""

    chunks: list[tuple[int, int]]
    decodes: list[int]

    @property
    def blocks(self) -> int:
        return sum(-(-total // BLOCK_TOKENS) for total in [*map(sum, self.chunks), *self.decodes])

    def placed(self) -> list[Row]:
        """Return the rows of the step over scattered blocks, the decoding requests first."""
        sizes = [(1, length - 1) for length in self.decodes] + self.chunks
        tables = torch.randperm(self.blocks).split([-(-sum(size) // BLOCK_TOKENS) for size in sizes])
        rows: list[Row] = []
        for (count, start), table in zip(sizes, tables, strict=True):
            rows.append(Row(rows[-1].first + rows[-1].count if rows else 0, count, start, table))
        return rows

    def floor_s(self, limits: Ceilings, heads: int, layout: KVLayout) -> float:
        """Return the least time of one layer."""
        pairs = sum(count * (start + (count + 1) / 2) for count, start in self.chunks) + sum(self.decodes)
        keys = sum(self.decodes) + sum(map(sum, self.chunks))
        return limits.floor_s(keys * layout.token_bytes / layout.layers, 4 * pairs * heads * layout.head_dim)


MIXES = {
    "2048 + 128 x 2048": Mix([(2048, 0)], [2048] * 128),
    "2 x 2048 + 128 x 2048": Mix([(2048, 0)] * 2, [2048] * 128),
    "512 after 8192 + 64 x 4096": Mix([(512, 8192)], [4096] * 64),
    "2048 after 14336 + 32 x 8192": Mix([(2048, 14336)], [8192] * 32),
    "512 + ragged": Mix([(512, 0)], [4641, 45118, 1730, 1696] * 2),
    "8192 + 16 x 1024": Mix([(8192, 0)], [1024] * 16),
}
REHEARSED = {"20 after 9 + ragged": Mix([(20, 9)], [5, 33, 17])}


@dataclass(frozen=True, slots=True)
class Streams:
    """Implements `AttentionPlan` with chunks on the current stream and decoding on another one."""

    chunks: AttentionPlan
    decodes: AttentionPlan
    tokens: Tensor
    side: torch.cuda.Stream

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            decoded = self.decodes.run(layer, queries[self.tokens], window)
        out = self.chunks.run(layer, queries, window)
        current.wait_stream(self.side)
        decoded.record_stream(current)
        out[self.tokens] = decoded
        return out


def forms(rows: list[Row], kv: PagedKV, queries: Tensor) -> dict[str, tuple[AttentionPlan, Tensor]]:
    """Return the plan and the queries of each form. The decoding requests are the first rows."""
    try:
        from baton.compute.triton.fused import FusedBackend, ticket_pools
        from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel
        from baton.compute.triton.persistent import PersistentDecodeKernel, resident_programs
    except ImportError as error:
        raise SystemExit("the kernels need triton, which PyTorch's CUDA builds bring: pip install triton") from error
    number, programs, on_device = queries.dtype, resident_programs(), queries.is_cuda
    kernel, decodes = TritonDecodeKernel(number), [row for row in rows if row.count == 1]
    serial, persistent = TritonBackend(kernel), PersistentDecodeKernel(number, programs=programs)
    whole = serial.plan(rows, kv)
    found: dict[str, tuple[AttentionPlan, Tensor]] = {
        "serial": (whole, queries),
        "serial_persistent": (TritonBackend(persistent).plan(rows, kv), queries),
        "fused": (FusedBackend(kernel, programs, ticket_pools() if on_device else 1).plan(rows, kv), queries),
        "fused_one_pool": (FusedBackend(kernel, programs).plan(rows, kv), queries),
        "chunks": (serial.plan(rows[len(decodes) :], kv), queries),
        "decodes": (serial.plan(decodes, kv), queries[: len(decodes)]),
    }
    if on_device and whole.chunks is not None and whole.decodes is not None:
        found["streams"] = Streams(whole.chunks, whole.decodes, whole.tokens, torch.cuda.Stream()), queries
    return found


def measure(
    mix: Mix, heads: int, layout: KVLayout, limits: Ceilings, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time a layer of a mix. Return each form's median seconds, the ratio of `serial` to it, its share of the floor."""
    kv = PagedKV(torch.zeros(layout.block_bytes * mix.blocks, dtype=torch.uint8, device=device), layout)
    random_kv(kv)
    rows = mix.placed()
    number = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies in float32 only
    queries = torch.randn(rows[-1].first + rows[-1].count, heads, layout.head_dim, device=device, dtype=number)
    floor_s = mix.floor_s(limits, heads, layout)
    seconds = {
        name: replayed([_layer(plan, layer, given) for layer in range(SETS)], device)
        for name, (plan, given) in forms(rows, kv, queries).items()
    }
    return {
        name: {"median_s": each, "serial_ratio": seconds["serial"] / each, "floor_ratio": floor_s / each}
        for name, each in seconds.items()
    }


def _layer(plan: AttentionPlan, layer: int, queries: Tensor) -> Callable[[], Tensor]:
    return lambda: plan.run(layer, queries, None)


def main() -> int:
    args = arguments(__doc__)
    lacks = missing(rehearse=args.rehearse)
    if lacks:
        print(f"gpu_fused: not run: {lacks}")
        return 0
    device, budget = torch.device("cpu" if args.rehearse else "cuda"), Budget(args.seconds)
    mixes, heads, kv_heads, head_dim = (REHEARSED, 4, 2, 16) if args.rehearse else (MIXES, 32, 8, 128)
    with torch.inference_mode():
        limits = ceilings(device, rehearse=args.rehearse)
        results = described(device, limits)
        for stored in ("bfloat16", "fp8"):
            plain: KVDtype = "float32" if args.rehearse else "bfloat16"
            layout = KVLayout(
                layers=SETS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS,
                dtype=plain if stored == "bfloat16" else stored,
            )  # fmt: skip
            for name, mix in mixes.items():
                case = name if stored == "bfloat16" else f"{name}, {stored}"
                if not budget.allows(case):
                    continue
                results[case] = found = measure(mix, heads, layout, limits, device)
                words = [
                    f"{form} {one['median_s'] * 1e6:.1f} us ({one['serial_ratio']:.2f})" for form, one in found.items()
                ]
                print(f"{case}: {', '.join(words)}", flush=True)
    record.write("gpu-fused", {**results, "left_out_for_time": budget.left_out}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
