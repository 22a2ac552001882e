"""Measure the handoff of a request's KV between two processes of one GPU: by reference, and as a copy.

python benchmarks/gpu_handoff.py [--seconds 60] [--rehearse]      (by `make gpu`)

The arena belongs to this process; another one maps it by CUDA IPC, as a decode worker does. By reference: the block ids
go to the other process, which answers at once. As a copy: it copies the blocks into its own memory. The copy's speed is
a share of the measured copy rate. A rehearsal shares memory of the host instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import record
import torch
from _gpu import Budget, Ceilings, arguments, ceilings, described, missing, synchronize
from torch import Tensor

from baton.move.arena.cuda import create_cuda_arena, open_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
from baton.move.arena.memfd import create_arena, open_arena

BLOCK_BYTES = 2 << 20
"""16 tokens of Llama-3.1-8B in bfloat16."""
PROMPTS = {"512 tokens": 32, "8192 tokens": 512, "32768 tokens": 2048}
REHEARSED = {"16 tokens": 1, "64 tokens": 4}
REPEATS = 15


def on_device(size_bytes: int, *, rehearse: bool) -> tuple[object, int, Tensor]:
    """Create an arena. Return it, its descriptor, and its bytes as a tensor."""
    if rehearse:
        arena = create_arena(size_bytes)
        return arena, arena.fd, torch.frombuffer(arena.memory, dtype=torch.uint8)
    shared = create_cuda_arena([(CudaDriver(0), size_bytes)])
    return shared, shared.fd, torch.as_tensor(shared.memory, device="cuda:0")


def receiver(fd: int, size_bytes: int, *, rehearse: bool) -> None:
    """Map the arena and answer requests: block ids and the kind of handoff, one JSON line each."""
    if rehearse:
        data = torch.frombuffer(open_arena(fd, size_bytes).memory, dtype=torch.uint8)
    else:
        data = torch.as_tensor(open_cuda_arena([(CudaDriver(0), size_bytes)], fd).memory, device="cuda:0")
    blocks = data.view(-1, BLOCK_BYTES)
    own = torch.empty_like(blocks[: len(blocks) // 2])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        wanted = json.loads(line)
        ids = torch.tensor(wanted["blocks"], device=data.device)
        if wanted["copies"]:
            torch.index_select(blocks, 0, ids, out=own[: len(ids)])
            read = own[: len(ids), 0].sum()
        else:
            read = blocks[ids, 0].sum()
        synchronize(data.device)
        sys.stdout.write(f"{int(read)}\n")
        sys.stdout.flush()


def measure(
    process: subprocess.Popen[str], data: Tensor, count: int, limits: Ceilings, device: torch.device
) -> dict[str, float]:
    """Hand over scattered blocks. Return median seconds of both kinds; the receiver has read them all then."""
    assert process.stdin is not None
    assert process.stdout is not None
    blocks = data.view(-1, BLOCK_BYTES)
    ids = torch.randperm(len(blocks))[:count].tolist()
    expected = int(blocks[torch.tensor(ids, device=device), 0].sum())
    found: dict[str, float] = {}
    for kind in ("reference", "copy"):
        times: list[float] = []
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            process.stdin.write(json.dumps({"blocks": ids, "copies": kind == "copy"}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            times.append(time.perf_counter() - began_s)
            if int(answer) != expected:
                raise SystemExit(f"the receiver read {answer.strip()}, and the sender holds {expected}")
        found[f"{kind}_s"] = statistics.median(times)
    size_bytes = count * BLOCK_BYTES
    found["copy_gb_per_s"] = size_bytes / found["copy_s"] / 1e9
    found["copy_floor_ratio"] = 2 * size_bytes / limits.copy_bytes_per_s / found["copy_s"]
    return found


def send(args: argparse.Namespace) -> int:
    device, budget = torch.device("cpu" if args.rehearse else "cuda:0"), Budget(args.seconds)
    limits = ceilings(device, rehearse=args.rehearse)
    results = described(device, limits)
    prompts = REHEARSED if args.rehearse else PROMPTS
    size_bytes = 2 * max(prompts.values()) * BLOCK_BYTES
    arena, fd, data = on_device(size_bytes, rehearse=args.rehearse)
    data.random_(0, 256)
    synchronize(device)
    command = [sys.executable, __file__, "--receive", str(fd), str(size_bytes), *(["--rehearse"] * args.rehearse)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd])
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit("the receiver did not start; its output is above")
    for name, count in prompts.items():
        if budget.allows(name):
            results[name] = found = measure(process, data, count, limits, device)
            print(
                f"handoff of {name}: {found['reference_s'] * 1e3:.2f} ms by reference, {found['copy_s'] * 1e3:.2f} ms "
                f"as a copy ({found['copy_floor_ratio']:.0%} of the floor)", flush=True,
            )  # fmt: skip
    process.communicate()
    del data, arena
    record.write("gpu-handoff", {**results, "left_out_for_time": budget.left_out}, args.out)
    return process.returncode


def main() -> int:
    if "--receive" in sys.argv:
        at = sys.argv.index("--receive")
        receiver(os.dup(int(sys.argv[at + 1])), int(sys.argv[at + 2]), rehearse="--rehearse" in sys.argv)
        return 0
    args = arguments(__doc__)
    lacks = missing(rehearse=args.rehearse)
    if lacks:
        print(f"gpu_handoff: not run: {lacks}")
        return 0
    return send(args)


if __name__ == "__main__":
    sys.exit(main())
