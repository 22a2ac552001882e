"""Compare Baton's native engine with other engines on the same weights: decode steps and prefill, in turns.

python benchmarks/engines.py [--peers FOLDER] [--work FOLDER] [--weights bfloat16 int8 int4] [--rounds 5]
                             [--batch 1 8 32] [--context 500] [--prompts 512 2048]
python benchmarks/engines.py --install FOLDER      creates a virtual environment per peer (minutes)

Every engine is a separate process. It has all cores during its turn, and is stopped (SIGSTOP) between turns. A round
gives each engine one turn per case. The table shows the fastest turn, which other load disturbed least, and the limits
of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import record
from peers.install import HERE, PEERS, PeerKind, install, missing, python_of
from peers.limits import Limits
from peers.models import model_of
from peers.protocol import Job
from peers.table import render

STEPS = 6


@dataclass
class Runner:
    """One engine's process with one model."""

    kind: PeerKind
    weights: str
    process: subprocess.Popen[str] | None
    """None if its model could not be made."""
    model: str = ""
    version: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """The median step of each turn, for each case."""
    failed: str = ""

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run one turn of the process, which is stopped before and after. Return None if it ended."""
        if self.process is None or self.failed:
            return None
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline() if self.process.stdout else ""
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.failed = f"ended with code {self.process.wait()}; its words are in {self.kind.name}-{self.weights}.log"
            return None
        os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(answer)

    def load(self, args: argparse.Namespace) -> None:
        """Wait until the process has loaded its model."""
        job = Job(
            model=self.model,
            weights=self.weights,
            context_tokens=args.context,
            prompt_tokens_max=max([4096, args.context, *args.prompts]),
            steps=STEPS,
            batch_max=max(args.batch, default=1),
            threads=args.threads,
        )
        loaded = self.ask(asdict(job))
        self.version = loaded["version"] if loaded else ""
        print(f"{self.kind.name} {self.weights}: {self.version or self.failed}", flush=True)

    def turn(self, case: dict[str, Any]) -> None:
        answer = self.ask(case)
        if answer is not None:
            self.seconds.setdefault(f"{case['kind']}_{case['size']}", []).append(statistics.median(answer["seconds"]))

    def end(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # waits, and closes its pipes


def start(kind: PeerKind, weights: str, args: argparse.Namespace) -> Runner:
    """Make a peer's model, and start its process."""
    work, python = Path(args.work), python_of(kind, Path(args.peers))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
    settings = [setting.format(cores=cores) for setting in kind.settings]
    command = ["env", f"VLLM_CACHE_ROOT={work / 'vllm'}", *settings, str(python), str(HERE / kind.script)]
    with (work / f"{kind.name}-{weights}.log").open("w") as log:
        try:
            model = model_of(kind.name, weights, work, python, log)
        except subprocess.CalledProcessError as error:
            words = f"its exporter ended with code {error.returncode}; its words are in {kind.name}-{weights}.log"
            return Runner(kind, weights, None, failed=words)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
        )
    return Runner(kind, weights, process, str(model))


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    decodes = [{"kind": "decode", "size": size} for size in args.batch]
    return decodes + [{"kind": "prefill", "size": size} for size in args.prompts]


def compare(weights: str, limits: Limits, args: argparse.Namespace) -> list[Runner]:
    """Run all engines at one precision of the weights, in turns."""
    kinds = [kind for kind in PEERS if weights in kind.weights and (not args.only or kind.name in args.only)]
    runners: list[Runner] = []
    try:
        for kind in kinds:
            if not missing(kind, Path(args.peers)):
                runners.append(start(kind, weights, args))  # before it is asked: what is stopped must be ended
                runners[-1].load(args)
        for number in range(args.rounds):
            limits.measure()
            for case in cases(args):
                for runner in runners:
                    runner.turn(case)
            print(f"{weights}: round {number + 1} of {args.rounds}", flush=True)
    finally:
        for runner in runners:
            runner.end()
    return runners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", metavar="FOLDER", help="make the peers' environments there, and end")
    parser.add_argument("--peers", default="peers", metavar="FOLDER", help="where --install made them")
    parser.add_argument("--work", default=tempfile.gettempdir() + "/baton-engines", help="for models and logs")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--only", nargs="+", default=[], help="names of the engines to run")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="requests of a decode step")
    parser.add_argument("--context", type=int, default=500, help="tokens before a decode step")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048], help="tokens of a prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="engines", help="of the result in benchmarks/results")
    args = parser.parse_args()
    if args.install:
        install(Path(args.install))
        return
    Path(args.work).mkdir(parents=True, exist_ok=True)
    limits = Limits(Path(args.work), args.threads)
    found = {weights: compare(weights, limits, args) for weights in args.weights}
    figures = {
        "what": f"SmolLM2-135M; decode: seconds of a step after {args.context} tokens; prefill: seconds of a prompt; "
        "per turn the median step, here the least of all turns and their median",
        "context_tokens": args.context,
        "not_installed": {
            kind.name: missing(kind, Path(args.peers)) for kind in PEERS if missing(kind, Path(args.peers))
        },
        "limits": {"read_bytes_per_s": limits.read_bytes_per_s, "flops": limits.flops},
        "engines": [
            {
                "engine": runner.kind.name,
                "weights": weights,
                "version": runner.version,
                "failed": runner.failed,
                "seconds": {
                    case: {"least": min(times), "median": statistics.median(times), "turns": len(times)}
                    for case, times in runner.seconds.items()
                },
            }
            for weights, runners in found.items()
            for runner in runners
        ],
    }
    table = render(figures)
    record.write(args.name, {**figures, "table": table.splitlines()})
    print(table)


if __name__ == "__main__":
    main()
