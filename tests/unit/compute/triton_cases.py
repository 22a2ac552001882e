"""Run by test_triton_decode.py in a process of its own: the interpreter is chosen before triton is imported.

Argument: the number of random batches. Prints one line per case, its name and the largest difference to the oracle,
and the number of random batches that were equal.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from baton.compute.torch.kernels.layer_ops import HeadNorms, NewTokens
from baton.compute.torch.kernels.paged_decode import decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.triton.fused import FusedBackend, FusedPlan
from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel, TritonRowProduct
from baton.compute.triton.layer_ops import TritonOps
from baton.compute.triton.persistent import PersistentDecodeKernel
from baton.decide.kv.layout import KVDtype, KVLayout
from tests.unit.compute import triton_properties
from tests.unit.compute.reference_kernels import PaddedOps, TorchDecodeKernel, TorchRowProduct

LENGTHS = {"short": [1, 15, 16, 17], "ragged": [1, 40, 513], "one_long": [1030]}
HEADS = {"no_group": (2, 2, 8), "group_of_3": (6, 2, 8), "wide_group": (40, 1, 24), "odd_width": (4, 2, 20)}
LAYERS, BLOCK_TOKENS = 2, 16
FORMS = {"split": TritonDecodeKernel, "persistent": PersistentDecodeKernel}


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


def case(name: str, lengths: list[int], heads: tuple[int, int, int], *, rope_dim: int = 0, dtype: KVDtype = "float32",
         window: int | None = None) -> None:  # fmt: skip
    torch.manual_seed(4)
    count, kv_heads, head_dim = heads
    planes = 1 if rope_dim else 2
    layout = KVLayout(
        layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS, dtype=dtype, planes=planes
    )
    rows, kv = batch(lengths, layout)
    queries = torch.randn(len(rows), count, head_dim)
    shown = slice(0, head_dim - rope_dim)
    oracle = ReferenceBackend().plan(rows, kv).run(1, queries, window).view(queries.shape)
    second = TorchDecodeKernel().plan(decode_tables(rows, queries.device), kv).run(1, queries, window)
    for form, kernel in FORMS.items():
        mine = TritonBackend(kernel(torch.float32, rope_dim)).plan(rows, kv).run(1, queries, window).view_as(oracle)
        others = (oracle, second.view_as(mine))
        print(f"{form}, {name}: {max(float((other - mine)[..., shown].abs().max()) for other in others):.3e}")


def same_bits_in_any_order() -> None:
    """One launch gives the bits of two, if its work is taken in another order and by other numbers of programs.

    The kernel is used again without clearing its counters.
    """
    torch.manual_seed(4)
    differing = 0
    for rope_dim, (count, kv_heads, head_dim) in ((0, (6, 2, 16)), (8, (40, 1, 32))):
        planes = 1 if rope_dim else 2
        layout = KVLayout(
            layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16, dtype="float32", planes=planes
        )
        rows, kv = batch([514, 3], layout)
        queries, tables = torch.randn(2, count, head_dim), decode_tables(rows, torch.device("cpu"))
        expected = TritonDecodeKernel(torch.float32, rope_dim).plan(tables, kv).run(1, queries, None)
        plan = PersistentDecodeKernel(torch.float32, rope_dim, programs=5).plan(tables, kv)
        for _ in range(2):
            differing += int((plan.run(1, queries, None) != expected).sum())
            for queue in plan.queues.values():
                total = int(queue.counts[0])
                queue.items[:total] = queue.items[torch.randperm(total)]
    print(f"same bits in one launch: {differing:.3e}")


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


def chunks() -> None:
    """Chunks from a request's start, and behind cached blocks, in pieces of any size. Unwritten slots are NaN."""
    sizes: list[tuple[int, int, int, KVDtype]] = [(4, 2, 16, "float32"), (3, 1, 80, "float32"), (2, 1, 24, "fp8")]
    for heads, kv_heads, head_dim, dtype in sizes:
        layout = KVLayout(layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS, dtype=dtype)
        rows, kv = batch([50, 33, 30, 133, 2], layout)
        counts = (50, 9, 1, 33, 2)  # new tokens: one request decodes
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        rows = [
            Row(first, count, row.total - count, row.blocks)
            for first, count, row in zip(firsts, counts, rows, strict=True)
        ]
        queries = torch.randn(sum(counts), heads, head_dim)
        backend = TritonBackend(TritonDecodeKernel(products=torch.float32))
        found = {window: backend.plan(rows, kv).run(1, queries, window) for window in (None, 1, 40)}
        for window, mine in found.items():
            worst = float((mine - ReferenceBackend().plan(rows, kv).run(1, queries, window)).abs().max())
            print(f"chunks of heads of {head_dim}, window {window}: {worst:.3e}")
        differing = fused_differing(rows, kv, queries, found)
        print(f"same bits in one launch, heads of {head_dim}: {differing:.3e}")
        row = rows[3]  # the same tokens, cut elsewhere
        pieces = [Row(0, 20, row.start, row.blocks[:8]), Row(0, 13, row.start + 20, row.blocks)]
        cut = [
            backend.plan([piece], kv).run(1, queries[row.first + start : row.first + start + piece.count], None)
            for start, piece in zip((0, 20), pieces, strict=True)
        ]
        whole = found[None][row.first : row.first + row.count]
        print(f"same bits in other chunks, heads of {head_dim}: {float((torch.cat(cut) != whole).sum()):.3e}")


def fused_differing(rows: list[Row], kv: PagedKV, queries: Tensor, serial: dict[int | None, Tensor]) -> int:
    """Count the numbers that a mixed step in one launch computes otherwise, in two orders of its work.

    serial: the result of two launches by window. A launch leaves its counters at 0.
    """
    backend, differing = FusedBackend(TritonDecodeKernel(products=torch.float32), programs=5), 0
    for window, expected in serial.items():
        plan = backend.plan(rows, kv)
        assert isinstance(plan, FusedPlan)
        for _ in range(2):
            differing += int((plan.run(1, queries, window) != expected).sum())
            differing += int(backend.counters(len(plan.host_lengths) * kv.layout.kv_heads, kv.data.device).sum())
            plan.tile_numbers[:] = plan.tile_numbers[torch.randperm(len(plan.tile_numbers))]
            for queue in plan.queues.values():
                total = int(queue.counts[0])
                queue.items[:total] = queue.items[torch.randperm(total)]
    return differing


def latent_chunk() -> None:
    """A few tokens behind cached ones read the latents as they are."""
    torch.manual_seed(4)
    layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=32, block_tokens=BLOCK_TOKENS, dtype="float32", planes=1)
    rows, kv = batch([40, 33], layout)
    mixed = [Row(0, 5, 35, rows[0].blocks), Row(5, 1, 32, rows[1].blocks)]
    queries = torch.randn(6, 5, 32)
    kernel = TritonDecodeKernel(products=torch.float32, rope_dim=8)
    mine = TritonBackend(kernel).plan(mixed, kv).run(1, queries, None).view(queries.shape)[..., :24]
    oracle = ReferenceBackend().plan(mixed, kv).run(1, queries, None).view(queries.shape)[..., :24]
    print(f"latent chunk: {float((mine - oracle).abs().max()):.3e}")


def layer_ops() -> None:
    """Each fused operation equals torch's. Padding writes no KV."""
    torch.manual_seed(4)
    mine, oracle = TritonOps(), PaddedOps()
    hidden, added, weight = torch.randn(3, 72), torch.randn(3, 72), torch.randn(72)
    for name, second in (("norm", None), ("sum and norm", added)):
        found, expected = mine.add_norm(hidden, second, weight, 1e-5), oracle.add_norm(hidden, second, weight, 1e-5)
        print(f"{name}: {max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)):.3e}")
    gate_up = torch.randn(3, 2 * 1100)
    print(f"gate: {float((mine.gate(gate_up) - oracle.gate(gate_up)).abs().max()):.3e}")
    cos, sin = torch.randn(2, 4, 1, 20)
    slots = torch.tensor([17, 3, -1, 40])
    norms = HeadNorms(torch.randn(20), torch.randn(20), 1e-6)
    writes: list[tuple[str, HeadNorms | None, KVDtype]] = [
        ("rotation", None, "float32"), ("rotation after norms", norms, "float32"), ("rotation to fp8", None, "fp8"),
    ]  # fmt: skip
    for name, each, dtype in writes:
        layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=20, block_tokens=BLOCK_TOKENS, dtype=dtype)
        qkv, arenas, found = torch.randn(4, 6 + 4, 20), [], []
        for ops in (mine, oracle):
            kv = PagedKV(torch.zeros(layout.block_bytes * 3, dtype=torch.uint8), layout)
            found.append(ops.rotate_and_write(qkv, 1, NewTokens(cos, sin, slots, kv), each))
            arenas.append(kv.data.float())
        worst = max(float((found[0] - found[1]).abs().max()), float((arenas[0] - arenas[1]).abs().max()))
        print(f"{name}: {worst:.3e}")
    for dtype in ("float32", "fp8"):
        layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=40, block_tokens=BLOCK_TOKENS, dtype=dtype, planes=1)
        latents, arenas = torch.randn(4, 40) * torch.logspace(-6, 2, 40), []
        latents[1, 3], latents[3] = float("nan"), 0.0
        for ops in (mine, oracle):
            kv = PagedKV(torch.zeros(layout.block_bytes * 3, dtype=torch.uint8), layout)
            ops.write_latents(latents, 1, NewTokens(cos, sin, slots, kv))
            arenas.append(kv.data.float().nan_to_num(nan=9.0))
        print(f"latents in {dtype}: {float((arenas[0] - arenas[1]).abs().max()):.3e}")


def main() -> None:
    for heads in HEADS:
        case(f"heads {heads}", [40, 514] if heads == "wide_group" else [1, 40], HEADS[heads])
    for lengths in LENGTHS:
        case(f"lengths {lengths}", LENGTHS[lengths], HEADS["group_of_3"])
    for window in (1, 20, 530):
        case(f"window {window}", [1, 40, 560], HEADS["no_group"], window=window)
    for dtype in ("bfloat16", "float16", "fp8"):
        case(f"stored as {dtype}", [1, 40], HEADS["no_group"], dtype=dtype)
    for dtype in ("float32", "fp8"):
        case(f"latent in {dtype}", [40, 514], (5, 1, 24 + 8), rope_dim=8, dtype=dtype)
    same_bits_in_any_order()
    mixed_step()
    chunks()
    latent_chunk()
    layer_ops()
    expert_rows()
    alone_and_together()
    triton_properties.run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
