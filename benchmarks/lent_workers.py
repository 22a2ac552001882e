"""What a busy model gains from a further worker on the core of an idle model, compared with steps that use that core.

python benchmarks/lent_workers.py [--rounds 3]

On a machine of two cores. Servers with one busy model take turns:

- `steps`: two models of one mixed worker and one core each. The other model is idle, and the steps of the busy one
  use its core (`idle_cores = "lend"`, the default).
- `workers`: two mixed workers with a core each. A further worker on the lent core amounts to this once it has loaded.
- `threads`: one mixed worker that owns both cores: the most that `steps` can reach.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import record
from serving import bench  # puts the repository on the path

from tests.serving import RunningServer, serving

CONCURRENCY = 16
LOADS = {"128 in, 64 out": (128, 64), "512 in, 8 out": (512, 8)}
KV = "[kv]\nblocks = 1024\n"
TWO_MODELS = "".join(f'[[models]]\nname = "{name}"\nmodel = "smollm2-135m"\nmixed = 1\n' for name in ("busy", "idle"))
CONFIGS = {
    "steps": 'idle_cores = "lend"\n' + KV + TWO_MODELS,
    "workers": 'idle_cores = "keep"\n' + KV + "[topology]\nmixed = 2\n",
    "threads": KV + "[topology]\nmixed = 1\n",
}


def start(stack: ExitStack, config: str) -> RunningServer:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.toml"
    path.write_text(config)
    return stack.enter_context(serving("--config", str(path)))


def turn(server: RunningServer, load: tuple[int, int], seed: int) -> dict[str, float]:
    """Send one request for each of the concurrent clients. Return rates and medians."""
    result = bench(
        server,
        *("--concurrency", str(CONCURRENCY), "--requests", str(CONCURRENCY), "--seed", str(seed)),
        *("--input-tokens", str(load[0]), "--output-tokens", str(load[1])),
    )
    return {
        "output_tokens_per_s": result["output_tokens_per_s"],
        "ttft_s": result["ttft_s"]["p50"],
        "tpot_s": result["tpot_s"]["p50"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seen: dict[str, dict[str, list[dict[str, float]]]] = {load: {name: [] for name in CONFIGS} for load in LOADS}
    with ExitStack() as stack:
        servers = {name: start(stack, config) for name, config in CONFIGS.items()}
        for number in range(args.rounds):
            for load, tokens in LOADS.items():
                for name, server in servers.items():
                    seen[load][name].append(turn(server, tokens, seed=number))
                    print(load, name, seen[load][name][-1], flush=True)
    record.write(
        "lent-workers",
        {
            "what": f"SmolLM2-135M, mixed workers, {CONCURRENCY} concurrent requests; medians of the rounds",
            "figures": {load: {name: medians(turns) for name, turns in each.items()} for load, each in seen.items()},
            "rounds": seen,
        },
    )


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in turns) for key in turns[0]}


if __name__ == "__main__":
    main()
