"""Compute how evenly a decode step's attention lies on a GPU's programs: the queue of one launch, and a grid.

python benchmarks/decode_balance.py      (no GPU: Triton's interpreter writes the queue that a GPU would)

A program is a place where one program runs at a time, two per processor of an H200. Each takes the next piece of work
when it is free. Work is bytes of KV. The grid is that of the two-launch form: captured for 65,536 tokens, so most of
its programs find no keys. `worst`: the most loaded program relative to the mean.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
from collections.abc import Iterable

import record

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import torch

from baton.compute.decode_sizes import SPLIT_TOKENS
from baton.compute.torch.kernels.attention_backend import NO_WINDOW
from baton.compute.triton.persistent import ITEMS_PER_PROGRAM, schedule

PROGRAMS = 264
CAPTURED_TOKENS = 65_536
KINDS = {"grouped (8 KV heads of 128)": (8, 512), "latent (128 heads of 576)": (4, 1152)}
"""Head tiles, and bytes of a key and its value in bfloat16 per head tile."""


def batches() -> dict[str, list[int]]:
    """Return batches of context lengths: equal ones, one long one among short ones, and lengths of a wide spread."""
    rng = random.Random(7)
    return {
        "64 x 512": [512] * 64,
        "128 x 4,096": [4096] * 128,
        "45,118 and 3 short": [4641, 45118, 1730, 1696],
        "32, log-normal": [min(32_000, 16 + int(rng.lognormvariate(7.2, 1.2))) for _ in range(32)],
        "128, log-normal": [min(32_000, 16 + int(rng.lognormvariate(7.2, 1.2))) for _ in range(128)],
    }


def loads(work: Iterable[int]) -> list[int]:
    """Return the work of each program, if the first free one takes the next piece."""
    programs = [0] * PROGRAMS
    for piece in work:
        heapq.heapreplace(programs, programs[0] + piece)
    return programs


def measure(lengths: list[int], tiles: int, key_bytes: int) -> dict[str, float]:
    """Return the loads of both forms on one batch."""
    splits_max = CAPTURED_TOKENS // SPLIT_TOKENS
    queue = schedule(
        torch.tensor(lengths, dtype=torch.int32), tiles, splits_max, NO_WINDOW, PROGRAMS * ITEMS_PER_PROGRAM
    )
    items = queue.items[: int(queue.counts[0])].tolist()
    queued = [
        (min(end * SPLIT_TOKENS, lengths[request]) - first * SPLIT_TOKENS) * key_bytes
        for request, _, first, end in items
    ]
    grid = [  # the last dimension of a grid is the slowest one
        max(0, min(SPLIT_TOKENS, length - split * SPLIT_TOKENS)) * key_bytes
        for split in range(splits_max)
        for _ in range(tiles)
        for length in lengths
    ]
    mean = sum(queued) / PROGRAMS
    assert sum(queued) == sum(grid)
    return {
        "mean_bytes": mean,
        "queue_worst_ratio": max(loads(queued)) / mean,
        "grid_worst_ratio": max(loads(grid)) / mean,
        "queue_items": len(queued),
        "grid_programs": len(grid),
        "grid_empty_ratio": grid.count(0) / len(grid),
        "bound_ratio": max(1.0, max(queued) / mean),
    }


def main() -> int:
    found = {
        f"{kind}, {name}": measure(lengths, tiles, key_bytes)
        for kind, (tiles, key_bytes) in KINDS.items()
        for name, lengths in batches().items()
    }
    record.write("decode-balance", {"programs": PROGRAMS, "batches": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
