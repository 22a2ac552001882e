"""Overhead of Baton in front of one vLLM server, by vLLM's own client: `vllm bench serve` to both, in turn.

Start a vLLM server and Baton over it, with `--batch-requests` as vLLM's `--max-num-seqs`, then:
`python benchmarks/vllm_overhead.py --vllm URL --baton URL --name m model --model FOLDER --bench ENV/bin/vllm`
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIGURES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "request_throughput", "output_throughput")


@dataclass(frozen=True)
class Load:
    requests: int
    at_once: int
    input_tokens: int
    output_tokens: int


def measure(bench: Sequence[str], url: str, name: str, model: str, load: Load, seed: int) -> dict[str, float]:
    """Run the client once. Return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, object] = {
            "backend": "openai",
            "base-url": url,
            "model": name,
            "tokenizer": model,
            "dataset-name": "random",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            "max-concurrency": load.at_once,
            "seed": seed,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        command = [*bench, "bench", "serve", "--ignore-eos", "--save-result"]
        command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != load.requests:
        sys.exit(f"{url}: {result['completed']} of {load.requests} requests completed")
    return {figure: result[figure] for figure in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, metavar="URL")
    parser.add_argument("--baton", required=True, metavar="URL")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="for the client's tokenizer")
    parser.add_argument("--name", nargs=2, required=True, metavar=("VLLM", "BATON"), help="the model's name at each")
    parser.add_argument("--bench", default="vllm", metavar="CMD", help="program with `bench serve`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    load = Load(args.requests, args.at_once, args.input_tokens, args.output_tokens)
    sides = {"vllm": (args.vllm, args.name[0]), "baton": (args.baton, args.name[1])}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(2 * args.rounds):
        side = ("vllm", "baton", "baton", "vllm")[turn % 4]  # neither side is always the second one
        url, name = sides[side]
        # A prompt is sent once, so that no side finds it in the prefix cache.
        runs[side].append(measure(shlex.split(args.bench), url, name, args.model, load, seed=1000 + turn))
        print(side, {figure: round(value, 2) for figure, value in runs[side][-1].items()}, flush=True)
    medians = {side: {f: statistics.median(run[f] for run in runs[side]) for f in FIGURES} for side in sides}
    for figure in FIGURES:
        ours, theirs = medians["baton"][figure], medians["vllm"][figure]
        print(f"{figure:20} vLLM {theirs:9.2f}  Baton {ours:9.2f}  {ours - theirs:+8.2f}  {ours / theirs - 1:+.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps({"load": vars(load), "medians": medians, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
