"""KV between GPUs by way of the host: staged copies and tcp over loopback, beside one cudaMemcpy of the same bytes.

python benchmarks/gpu_staging.py [--repeats 9]      (through `make gpu`; elsewhere it says what is missing)

Scattered blocks of 2 MiB. `plain` is one copy of as many bytes to page-locked memory, or from it, and nothing else;
`staged` is the same in portions through two buffers; `tcp` goes from the device to another place on it over four
connections of this machine; `tcp_host` the same between memories of the host. GB/s, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import record

from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, create_cuda_arena
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver, CudaUnavailableError
from baton.move.arena.cuda_memory import CudaMemory
from baton.move.arena.memfd import create_arena
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.port import Extent, Memory
from baton.move.transport.staged import StagedMemory
from baton.move.transport.tcp import TcpTransport

BLOCK_BYTES = 2 << 20
LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
SIZES_MIB = (32, 256, 1024)


def timed(work: Callable[[], None], size_bytes: int, repeats: int) -> float:
    """Return the median speed in GB/s, after one run that warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return size_bytes / statistics.median(times[1:]) / 1e9


def scattered(blocks: int, region: int = 0) -> list[Extent]:
    """Every second block of the arena, shuffled."""
    places = random.Random(blocks).sample(range(0, 2 * blocks, 2), blocks)
    return [Extent(place * BLOCK_BYTES, BLOCK_BYTES, region) for place in places]


def drained(spread: Spread) -> None:
    """Read it all, and look at nothing."""
    for _ in spread.read(0, spread.size_bytes, spread.portion_bytes(spread.size_bytes)):
        pass


def filled(spread: Spread) -> None:
    """Write whatever the buffers hold."""
    for _ in spread.write(0, spread.size_bytes, spread.portion_bytes(spread.size_bytes)):
        pass


def over_tcp(source: Memory, target: Memory, blocks: int, repeats: int) -> float:
    """Move scattered blocks from one memory to another."""
    with ExitStack() as opened:
        transports = [TcpTransport("127.0.0.1:0") for _ in range(2)]
        for transport, memory in zip(transports, (source, target), strict=True):
            opened.callback(transport.close)
            transport.register(memory)
        ticket = transports[0].offer(scattered(blocks), lease_s=3600.0)

        def pull() -> None:
            transports[1].pull(ticket, scattered(blocks)).wait()

        return timed(pull, blocks * BLOCK_BYTES, repeats)


def measure(arenas: list[CudaArena], blocks: int, repeats: int) -> dict[str, float]:
    """Move so many blocks by every way."""
    size_bytes = blocks * BLOCK_BYTES
    whole = np.array([[0, 0, size_bytes]])
    memories = [CudaMemory(arena.parts, LAYOUT) for arena in arenas]
    plain = memories[0].buffer(size_bytes)

    def copy(begin: Callable[[np.ndarray], None]) -> Callable[[], None]:
        def run() -> None:
            begin(whole)
            plain.wait()

        return run

    figures = {
        "plain_out": timed(copy(plain.copy_out), size_bytes, repeats),
        "plain_in": timed(copy(plain.copy_in), size_bytes, repeats),
    }
    plain.close()
    staged = [StagedMemory(memory) for memory in memories]
    spread = Spread(rows_of(scattered(blocks)), {0: staged[0]})
    figures["staged_out"] = timed(lambda: drained(spread), size_bytes, repeats)
    figures["staged_in"] = timed(lambda: filled(spread), size_bytes, repeats)
    figures["tcp"] = over_tcp(staged[0], staged[1], blocks, repeats)
    for each in staged:
        each.close()
    hosts = [create_arena(2 * size_bytes) for _ in range(2)]
    figures["tcp_host"] = over_tcp(hosts[0].memory, hosts[1].memory, blocks, repeats)
    for host in hosts:
        host.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=SIZES_MIB)
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no further size after this time")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the result file")
    parser.add_argument("--rehearse", action="store_true", help="prove that the host's part runs; there is no driver")
    parser.add_argument("--library", default=LIBRARY, help="the driver's")
    args = parser.parse_args()
    if args.rehearse:
        return rehearse(args.out)
    try:
        driver = CudaDriver(0, args.library)
    except CudaUnavailableError as error:
        print(f"gpu_staging: not run: {error}")
        return 0
    figures: dict[str, dict[str, float]] = {}
    began_s, left_out = time.perf_counter(), list[str]()
    for size_mib in args.sizes_mib:
        if time.perf_counter() - began_s > args.seconds:
            left_out.append(f"{size_mib} MiB")
            continue
        blocks = (size_mib << 20) // BLOCK_BYTES
        arenas = [create_cuda_arena([(driver, 2 * blocks * BLOCK_BYTES)]) for _ in range(2)]
        figures[f"{size_mib} MiB"] = measure(arenas, blocks, args.repeats)
        for arena in arenas:
            arena.close()
    heads = ["GB/s", *figures[next(iter(figures))]]
    print(record.table(heads, [[name, *(f"{one:.2f}" for one in each.values())] for name, each in figures.items()]))
    if args.library == LIBRARY:
        record.write("gpu-staging", {"gb_per_s": figures, "left_out_for_time": left_out}, args.out)
    return 0


def rehearse(folder: Path) -> int:
    """Move blocks between memories of the host over tcp: the part that needs no driver."""
    size_bytes = 8 * BLOCK_BYTES
    hosts = [create_arena(2 * size_bytes) for _ in range(2)]
    speed = over_tcp(hosts[0].memory, hosts[1].memory, 8, 2)
    for host in hosts:
        host.close()
    record.write("gpu-staging", {"gb_per_s": {"rehearsal": {"tcp_host": speed}}}, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
