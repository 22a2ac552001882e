"""Measure paged decode attention on a GPU: both forms of Baton's Triton kernels, torch's attention and FlashInfer's.

python benchmarks/gpu_decode.py [--seconds 120] [--rehearse]      (by `make gpu`, which sets PYTHONPATH)

A CUDA graph replays one layer over each of several sets of blocks, so that neither Python's launches nor the
second-level cache are measured. `floor`: the share of the time that the measured copy and matmul rates allow.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import record
import torch
from _gpu import Budget, Ceilings, arguments, ceilings, described, missing, random_kv, replayed
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_decode import decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVDtype, KVLayout
from tests.attention_cases import DECODE_LAYERS

BLOCK_TOKENS = 16
SETS = DECODE_LAYERS
"""Sets of blocks that a graph reads in turn: the layers of one arena."""
Sizes = dict[str, int]
GROUPED: Sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rope_dim": 0}
LATENT: Sizes = {"heads": 16, "kv_heads": 1, "head_dim": 576, "rope_dim": 64}
LATENT_WIDE: Sizes = LATENT | {"heads": 128}
BATCHES = {"b1_64k": [65536], "b64_512": [512] * 64, "b128_4k": [4096] * 128, "ragged": [4641, 45118, 1730, 1696]}
REHEARSED = {"b1_40": [40], "ragged": [5, 33, 17]}


def measure(
    sizes: Sizes, lengths: Sequence[int], stored: KVDtype, limits: Ceilings, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time one layer of one batch. Return median seconds, GB/s and the share of the floor of each backend.

    stored: bfloat16, or fp8. The interpreter of a rehearsal stores float32 instead of bfloat16.
    """
    try:
        from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel
        from baton.compute.triton.persistent import PersistentDecodeKernel, resident_programs
    except ImportError as error:
        raise SystemExit("the kernels need triton, which PyTorch's CUDA builds bring: pip install triton") from error
    number = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies in float32 only
    planes: Literal[1, 2] = 1 if sizes["rope_dim"] else 2
    layout = KVLayout(
        layers=SETS, kv_heads=sizes["kv_heads"], head_dim=sizes["head_dim"], block_tokens=BLOCK_TOKENS,
        dtype="float32" if number == torch.float32 and stored == "bfloat16" else stored, planes=planes,
    )  # fmt: skip
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv = PagedKV(torch.zeros(layout.block_bytes * sum(counts), dtype=torch.uint8, device=device), layout)
    random_kv(kv)
    tables = torch.randperm(sum(counts)).split(counts)
    rows = [
        Row(index, 1, length - 1, blocks) for index, (length, blocks) in enumerate(zip(lengths, tables, strict=True))
    ]
    queries = torch.randn(len(rows), sizes["heads"], sizes["head_dim"], device=device, dtype=number)
    rope_dim = sizes["rope_dim"]
    backends: dict[str, AttentionBackend] = {
        "triton": TritonBackend(TritonDecodeKernel(number, rope_dim)),
        "persistent": TritonBackend(PersistentDecodeKernel(number, rope_dim, resident_programs())),
        "sdpa": SdpaBackend(),
    }
    runs = {
        name: [_layer(backend.plan(rows, kv).run, layer, queries) for layer in range(SETS)]
        for name, backend in backends.items()
    }
    if device.type == "cuda" and planes == 2 and stored == "bfloat16" and importlib.util.find_spec("flashinfer"):
        runs["flashinfer"] = _flashinfer(rows, kv, queries)
    read_bytes = sum(lengths) * layout.token_bytes // layout.layers
    flop = 4 * sum(lengths) * sizes["heads"] * sizes["head_dim"]
    floor_s = limits.floor_s(read_bytes, flop)
    found: dict[str, dict[str, float]] = {}
    for name, calls in runs.items():
        seconds = replayed(calls, device)
        found[name] = {"median_s": seconds, "gb_per_s": read_bytes / seconds / 1e9, "floor_ratio": floor_s / seconds}
    return found


def _layer(run: Callable[[int, Tensor, None], Tensor], layer: int, queries: Tensor) -> Callable[[], Tensor]:
    return lambda: run(layer, queries, None)


def _flashinfer(rows: Sequence[Row], kv: PagedKV, queries: Tensor) -> list[Callable[[], Tensor]]:
    """Plan FlashInfer's paged decode over the same blocks."""
    try:
        import flashinfer
    except ImportError as error:
        raise SystemExit("this comparison needs FlashInfer: pip install flashinfer-python") from error
    tables, device = decode_tables(rows, queries.device), queries.device
    counts = torch.tensor([0, *(len(row.blocks) for row in rows)], dtype=torch.int32)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        counts.cumsum(0, dtype=torch.int32).to(device), torch.cat([row.blocks for row in rows]).int().to(device),
        ((tables.lengths - 1) % BLOCK_TOKENS + 1).int(), queries.shape[1], kv.layout.kv_heads, kv.layout.head_dim,
        BLOCK_TOKENS, q_data_type=queries.dtype, kv_data_type=kv.data.dtype,
    )  # fmt: skip
    return [lambda layer=layer: wrapper.run(queries, kv.data[:, layer]) for layer in range(SETS)]


def main() -> int:
    args = arguments(__doc__)
    lacks = missing(rehearse=args.rehearse)
    if lacks:
        print(f"gpu_decode: not run: {lacks}")
        return 0
    device, budget = torch.device("cpu" if args.rehearse else "cuda"), Budget(args.seconds)
    kinds: dict[str, tuple[Sizes, KVDtype]] = {
        "grouped": (GROUPED, "bfloat16"), "latent": (LATENT, "bfloat16"), "latent_128_heads": (LATENT_WIDE, "bfloat16"),
        "grouped_fp8": (GROUPED, "fp8"), "latent_fp8": (LATENT, "fp8"),
    }  # fmt: skip
    if args.rehearse:
        small = {"heads": 4, "kv_heads": 2, "head_dim": 16, "rope_dim": 0}
        kinds = {"grouped": (small, "bfloat16"), "grouped_fp8": (small, "fp8")}
    with torch.inference_mode():
        limits = ceilings(device, rehearse=args.rehearse)
        results = described(device, limits)
        for name, lengths in (REHEARSED if args.rehearse else BATCHES).items():
            for kind, (sizes, stored) in kinds.items():
                if not budget.allows(f"{kind} {name}"):
                    continue
                results[f"{kind}_{name}"] = found = measure(sizes, lengths, stored, limits, device)
                words = ", ".join(
                    f"{backend} {one['median_s'] * 1e6:.1f} us, {one['floor_ratio']:.0%} of the floor"
                    for backend, one in found.items()
                )
                print(f"{kind} {name}: {words}", flush=True)
    record.write("gpu-decode", {**results, "left_out_for_time": budget.left_out}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
