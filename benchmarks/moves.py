"""What a request feels when it moves to another host while it decodes: the gaps between its tokens.

PYTHONPATH=examples/policies python benchmarks/moves.py [--model smollm2-135m] [--tokens 600] [--rounds 3]

Two hosts on this machine, each with a decode worker of one thread; a policy moves every request to the other host once
a second. The
KV that is sealed goes ahead while the request decodes on; then it stops, what is left goes over, and it goes on. The
same request is asked for where nothing moves, interleaved. Gaps are seen by the client.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.hosting import cluster  # noqa: E402  the path comes first
from tests.serving import RunningServer  # noqa: E402

PROMPT = "Tell me everything that you know about the sea, the wind and the sails of ships. " * 20


@contextmanager
def served(model: str, *, moving: bool) -> Iterator[RunningServer]:
    """Run a server with two hosts, with or without the policy."""
    policy = "[policy.moves]\nuse = 'back_and_forth:BackAndForth'\n" if moving else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baton.toml"
        path.write_text(policy)
        hosts = {"a": ("--prefill", "1", "--decode", "1", "--threads", "1"), "b": ("--decode", "1", "--threads", "1")}
        with cluster(model, hosts, "--config", str(path)) as (server, _):
            yield server


def gaps_of(server: RunningServer, tokens: int) -> tuple[list[float], dict[str, Any]]:
    """Stream one answer. Returns the seconds between its chunks, and its timings."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    times_s: list[float] = []
    timings: dict[str, Any] = {}
    with server.client(timeout_s=600) as client, client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())
                timings = json.loads(line[6:]).get("timings") or timings
    return [late - early for early, late in pairwise(times_s)], timings


def measure(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    moves, pauses, steps_s, still_s = 0, [], [], []
    with served(model, moving=True) as moving, served(model, moving=False) as still:
        for server in (moving, still):
            gaps_of(server, 32)
        for _ in range(rounds):
            gaps, timings = gaps_of(moving, tokens)
            count = timings["attempts"] - 1
            moves += count
            step_s = statistics.median(gaps)
            steps_s.append(step_s)
            pauses += [pause_s / step_s for pause_s in sorted(gaps)[len(gaps) - count :]]
            gaps, _ = gaps_of(still, tokens)
            step_s = statistics.median(gaps)
            still_s.append(max(gaps) / step_s)
    return {
        "tokens": tokens,
        "moves": moves,
        "step_s": statistics.median(steps_s),
        "pause_steps": {"median": statistics.median(pauses), "max": max(pauses)} if pauses else None,
        "longest_gap_without_moves_steps": statistics.median(still_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.model, options.tokens, options.rounds)
    record.write("moves", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
