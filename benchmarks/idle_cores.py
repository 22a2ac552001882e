"""What a worker gains from a neighbour's core while that one sleeps, and what it costs where none does.

python benchmarks/idle_cores.py [--rounds 3] [--requests 6]

Two servers, one prefill and one decode worker each on a core of their own, one with `idle_cores = "lend"` and one with
"keep"; they take turns within every round, and who is not asked sleeps. At concurrency 1 one of the two workers always
sleeps; at 8 mostly neither does. `idle_cpu_ratio` is the CPU time of a server and its workers over some seconds in
which nothing is asked of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import record
from serving import bench  # puts the repository on the path

from tests.serving import RunningServer, serving

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
IDLE_S = 5.0
CONCURRENCIES = (1, 8)


def start(stack: ExitStack, idle_cores: str) -> RunningServer:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.toml"
    path.write_text(f'idle_cores = "{idle_cores}"\ndtype = "bfloat16"\n')
    return stack.enter_context(serving("--config", str(path), "--prefill", "1", "--decode", "1"))


def turn(server: RunningServer, concurrency: int, *, requests: int, seed: int) -> dict[str, float]:
    """Ask for some requests of their own prompts. Returns the medians."""
    result = bench(
        server,
        *("--concurrency", str(concurrency), "--requests", str(requests * concurrency), "--seed", str(seed)),
        *("--input-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)),
    )
    return {"ttft_s": result["ttft_s"]["p50"], "tpot_s": result["tpot_s"]["p50"]}


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def idle_ratio(server: RunningServer) -> float:
    """CPU time of the server and its workers while nothing is asked, over the time."""
    pids = [server.process.pid, *server.worker_pids()]
    before_s, started_s = cpu_s(pids), time.perf_counter()
    Event().wait(IDLE_S)  # nobody sets it
    return (cpu_s(pids) - before_s) / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="of each client in a turn")
    args = parser.parse_args()
    seen: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        servers = {name: start(stack, name) for name in ("lend", "keep")}
        idle = {name: idle_ratio(server) for name, server in servers.items()}
        for number in range(args.rounds):
            for concurrency in CONCURRENCIES:
                for name, server in servers.items():
                    found = turn(server, concurrency, requests=args.requests, seed=10 * number + concurrency)
                    seen.setdefault(f"concurrency {concurrency}", {}).setdefault(name, []).append(found)
    record.write(
        "idle-cores",
        {
            "what": f"SmolLM2-135M, bfloat16, 1 prefill + 1 decode, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out; "
            "medians of the rounds' medians",
            "figures": {case: {name: medians(turns) for name, turns in each.items()} for case, each in seen.items()},
            "idle_cpu_ratio": idle,
        },
    )


def medians(turns: list[dict[str, float]]) -> dict[str, Any]:
    return {key: statistics.median(each[key] for each in turns) for key in turns[0]} | {"rounds": len(turns)}


if __name__ == "__main__":
    main()
