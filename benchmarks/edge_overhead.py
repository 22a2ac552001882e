"""Measure the overhead of all checks of the HTTP edge: the same server with and without them, by turns in one run.

python benchmarks/edge_overhead.py [--quick] [--rounds 20]

The model is the hash engine, whose steps take microseconds, so the server process limits the throughput. The server
without checks (`_edge_without_checks.py`) serves with uvicorn's own protocol, without rules for hosts and origins, and
without keys and limits. Each round measures both servers, and the figures are medians over these pairs. The throughput
of the embedded model follows in the same run: the CPU time of the checks of that many requests is the share of its
throughput that they cost, because its workers use all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import RunningServer

WITHOUT = Path(__file__).with_name("_edge_without_checks.py")
PROMPT_CHARS = 128
CONCURRENCY = 8
OUTPUT_TOKENS = 64
LOADS = {"64 tokens, streamed": OUTPUT_TOKENS, "1 token": 1}
EMBEDDED_REQUESTS = 32


@contextmanager
def started(*command: str, model: str = "hash") -> Iterator[RunningServer]:
    """Run a server for the length of a with block."""
    with tempfile.TemporaryDirectory() as folder:
        serve = [sys.executable, "-u", *command, "serve", model, "--mixed", "1", "--port", "0"]
        process = subprocess.Popen(serve, stdout=subprocess.PIPE)
        server = RunningServer(process, Path(folder) / "log")
        try:
            server.wait_listening()
            server.wait_ready()
            yield server
        finally:
            process.terminate()
            process.wait(30)


class Connection:
    """A kept-alive connection that sends requests of one kind, and reads their responses."""

    def __init__(self, url: str, tokens: int, rng: random.Random) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._tokens = tokens
        self._rng = rng

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def ask(self) -> float:
        """Send a request and read its stream to the end. Return its TTFT in seconds."""
        prompt = "".join(self._rng.choices("abcdefgh ", k=PROMPT_CHARS))  # no prefix hit
        fields = {"prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begun_s = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._reader.readuntil(b"data: {")
        ttft_s = time.perf_counter() - begun_s
        await self._reader.readuntil(b"[DONE]")
        await self._reader.readuntil(b"0\r\n\r\n")
        return ttft_s

    def close(self) -> None:
        self._writer.close()


async def ttft_s(url: str, tokens: int, requests: int, rng: random.Random) -> float:
    """Return the median TTFT of requests one after the other."""
    connection = Connection(url, tokens, rng)
    await connection.open()
    times_s = [await connection.ask() for _ in range(requests)]
    connection.close()
    return statistics.median(times_s)


async def requests_per_s(url: str, tokens: int, requests: int, rng: random.Random) -> float:
    """Return the throughput of some clients, each of which sends its next request after its last response."""

    async def client() -> None:
        connection = Connection(url, tokens, rng)
        await connection.open()
        for _ in range(requests // CONCURRENCY):
            await connection.ask()
        connection.close()

    begun_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return requests / (time.perf_counter() - begun_s)


def cpu_s(server: RunningServer) -> float:
    """Return the CPU time that the server process has used, without its workers."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def measure(server: RunningServer, tokens: int, requests: int, rng: random.Random) -> dict[str, float]:
    """Measure one server in one round."""
    alone_s = asyncio.run(ttft_s(server.url, tokens, requests // 4, rng))
    before_s = cpu_s(server)
    rate = asyncio.run(requests_per_s(server.url, tokens, requests, rng))
    return {"ttft_s": alone_s, "requests_per_s": rate, "cpu_s": (cpu_s(server) - before_s) / requests}


def compare(checked: RunningServer, bare: RunningServer, tokens: int, *, rounds: int, requests: int) -> dict[str, Any]:
    """Measure both servers by turns, and return the figures of both and of their differences."""
    rng = random.Random(tokens)
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for server in (checked, bare):
        measure(server, tokens, requests // 2, rng)  # warm up
    for number in range(rounds):
        both = [(True, checked), (False, bare)]
        found = {key: measure(server, tokens, requests, rng) for key, server in (both if number % 2 else both[::-1])}
        pairs.append((found[True], found[False]))
    return {
        "with_checks": {key: record.spread([one[key] for one, _ in pairs]) for key in pairs[0][0]},
        "without_checks": {key: record.spread([other[key] for _, other in pairs]) for key in pairs[0][0]},
        "throughput_lost_ratio": record.spread(
            [1 - one["requests_per_s"] / other["requests_per_s"] for one, other in pairs]
        ),
        "cpu_added_s": record.spread([one["cpu_s"] - other["cpu_s"] for one, other in pairs]),
        "ttft_added_s": record.spread([one["ttft_s"] - other["ttft_s"] for one, other in pairs]),
    }


def embedded(cpu_added_s: float, *, quick: bool) -> dict[str, float]:
    """Return the throughput of the embedded model, and the share of it that the checks of its requests cost."""
    with started("-m", "baton.cli.main", model="smollm2-135m") as server:
        rng = random.Random(0)
        asyncio.run(requests_per_s(server.url, OUTPUT_TOKENS, CONCURRENCY, rng))  # warm up
        count = CONCURRENCY if quick else EMBEDDED_REQUESTS
        rate = asyncio.run(requests_per_s(server.url, OUTPUT_TOKENS, count, rng))
    return {"requests_per_s": rate, "throughput_lost_ratio": cpu_added_s * rate / len(os.sched_getaffinity(0))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it works")
    parser.add_argument(
        "--rounds", type=int, default=20, help="pairs of measurements: the server with checks, then without"
    )
    args = parser.parse_args()
    rounds, requests = (2, 80) if args.quick else (args.rounds, 400)
    with ExitStack() as stack:
        checked = stack.enter_context(started("-m", "baton.cli.main"))
        bare = stack.enter_context(started(str(WITHOUT)))
        figures = {
            name: compare(checked, bare, tokens, rounds=rounds, requests=requests if tokens == 1 else requests // 4)
            for name, tokens in LOADS.items()
        }
    figures["embedded model"] = embedded(figures["64 tokens, streamed"]["cpu_added_s"]["median"], quick=args.quick)
    record.write("edge-overhead", {"concurrency": CONCURRENCY, "prompt_chars": PROMPT_CHARS, **figures})


if __name__ == "__main__":
    main()
