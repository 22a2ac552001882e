"""Run by test_triton_decode.py in a process of its own: the interpreter is chosen before triton is imported.

Argument: the number of random batches. Prints one line per case, its name and the largest difference to the oracle,
and the number of random batches that were equal.
"""

from __future__ import annotations

import sys

import torch

from baton.compute.torch.kernels.paged_decode import decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel, TritonRowProduct
from baton.decide.kv.layout import KVLayout
from tests.unit.compute import triton_properties
from tests.unit.compute.reference_kernels import TorchDecodeKernel, TorchRowProduct

LENGTHS = {"short": [1, 15, 16, 17], "ragged": [1, 40, 513], "one_long": [1030]}
HEADS = {"no_group": (2, 2, 8), "group_of_3": (6, 2, 8), "wide_group": (40, 1, 24), "odd_width": (4, 2, 20)}
LAYERS, BLOCK_TOKENS = 2, 16


def batch(lengths: list[int], layout: KVLayout) -> tuple[list[Row], PagedKV]:
    """Make requests over scattered blocks. Unwritten slots are NaN."""
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv = PagedKV(torch.full((layout.block_bytes * (sum(counts) + 3),), 255, dtype=torch.uint8), layout)
    ids = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    rows = [
        Row(first=index, count=1, start=length - 1, blocks=blocks)
        for index, (length, blocks) in enumerate(zip(lengths, ids, strict=True))
    ]
    everything = [Row(first=0, count=row.total, start=0, blocks=row.blocks) for row in rows]
    shape = (sum(lengths), layout.kv_heads, layout.head_dim)
    for layer in range(LAYERS):
        if layout.planes == 1:
            kv.write_latents(layer, kv.slots(everything), torch.randn(shape).flatten(1))
        else:
            kv.write(layer, kv.slots(everything), torch.randn(shape), torch.randn(shape))
    return rows, kv


def case(name: str, lengths: list[int], heads: tuple[int, int, int], *, rope_dim: int = 0, dtype: str = "float32",
         window: int | None = None) -> None:  # fmt: skip
    torch.manual_seed(4)
    count, kv_heads, head_dim = heads
    planes = 1 if rope_dim else 2
    layout = KVLayout(
        layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS, dtype=dtype, planes=planes
    )
    rows, kv = batch(lengths, layout)
    queries = torch.randn(len(rows), count, head_dim)
    kernel = TritonDecodeKernel(products=torch.float32, rope_dim=rope_dim)
    mine = TritonBackend(kernel).plan(rows, kv).run(1, queries, window).view(queries.shape)
    shown = slice(0, head_dim - rope_dim)
    oracle = ReferenceBackend().plan(rows, kv).run(1, queries, window).view(queries.shape)
    second = TorchDecodeKernel().plan(decode_tables(rows, queries.device), kv).run(1, queries, window)
    worst = max(float((other[..., shown] - mine[..., shown]).abs().max()) for other in (oracle, second.view_as(mine)))
    print(f"{name}: {worst:.3e}")


def expert_rows() -> None:
    """Sizes that are no multiples of a tile. Two products per row, then one."""
    torch.manual_seed(4)
    weights, experts = torch.randn(5, 45, 150), torch.tensor([4, 0, 1, 1, 3, 0])
    worst = 0.0
    for rows in (3, 6):
        inputs = torch.randn(rows, 150)
        mine, expected = TritonRowProduct()(inputs, weights, experts), TorchRowProduct()(inputs, weights, experts)
        worst = max(worst, float((mine - expected).abs().max()))
    print(f"expert rows: {worst:.3e}")


def alone_and_together() -> None:
    """A request's result has the same bits in a batch as alone."""
    torch.manual_seed(4)
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=16, block_tokens=BLOCK_TOKENS, dtype="float32")
    rows, kv = batch([514, 3, 40], layout)
    queries = torch.randn(3, 4, 16)
    backend = TritonBackend(TritonDecodeKernel(products=torch.float32))
    together = backend.plan(rows, kv).run(0, queries, None)
    single = [Row(first=0, count=1, start=row.start, blocks=row.blocks) for row in rows]
    alone = [backend.plan([row], kv).run(0, queries[index : index + 1], None)[0] for index, row in enumerate(single)]
    print(f"same bits alone and together: {float((torch.stack(alone) != together).sum()):.3e}")


def mixed_step() -> None:
    """Chunks of other requests stand between decoding ones."""
    torch.manual_seed(4)
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=16, block_tokens=BLOCK_TOKENS, dtype="float32")
    rows, kv = batch([40, 33, 25], layout)
    mixed = [rows[0], Row(first=1, count=9, start=24, blocks=rows[1].blocks), Row(10, 1, 24, rows[2].blocks)]
    queries = torch.randn(11, 4, 16)
    mine = TritonBackend(TritonDecodeKernel(products=torch.float32)).plan(mixed, kv).run(0, queries, 7)
    worst = float((mine - ReferenceBackend().plan(mixed, kv).run(0, queries, 7)).abs().max())
    print(f"mixed step: {worst:.3e}")


def main() -> None:
    for heads in HEADS:
        case(f"heads {heads}", [40, 514] if heads == "wide_group" else [1, 40], HEADS[heads])
    for lengths in LENGTHS:
        case(f"lengths {lengths}", LENGTHS[lengths], HEADS["group_of_3"])
    for window in (1, 20, 530):
        case(f"window {window}", [1, 40, 560], HEADS["no_group"], window=window)
    for dtype in ("bfloat16", "float16"):
        case(f"stored as {dtype}", [1, 40], HEADS["no_group"], dtype=dtype)
    case("latent", [40, 514], (5, 1, 24 + 8), rope_dim=8)
    mixed_step()
    expert_rows()
    alone_and_together()
    triton_properties.run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
