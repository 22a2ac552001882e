"""What a start costs: seconds until a server is ready, and CPU seconds and memory of each of its processes.

    python benchmarks/start.py [--runs N] [--against SRC]     start.json

With `--against`, the `src` folder of another version of this repository is measured too, run by run in turn with this
one. Memory is what a process has without the arena: its own pages, and its share of common ones (PSS). CPU seconds
are user and system time, so they hold on a busy machine, where seconds until ready do not. Command lines are measured
until they end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import serving

SRC = Path(__file__).resolve().parents[1] / "src"
SERVERS = {
    "1 mixed": ("--mixed", "1"),
    "1 prefill + 1 decode": (),
    "hash, 1 mixed": ("hash", "--mixed", "1"),
}
COMMAND_LINES = (("--help",), ("serve", "--help"), ("serve", "--port", "70000"), ("srve",), ("sim", "--help"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def server_figures(src: Path, arguments: tuple[str, ...]) -> dict[str, float]:
    """Start a server once, and look at it when it has said that it is ready."""
    started_s = perf_counter()
    with serving(*arguments, environment={"PYTHONPATH": str(src)}) as server:
        found = {"ready_s": perf_counter() - started_s}
        pids = [server.process.pid, *_children(server.process.pid)]
        for pid in pids:
            name = _name(pid)
            for figure, value in (("cpu_s", _cpu_s(pid)), ("pss_bytes", _pss_bytes(pid))):
                found[f"{name} {figure}"] = found.get(f"{name} {figure}", 0.0) + value
                found[f"all {figure}"] = found.get(f"all {figure}", 0.0) + value
    return found


def _children(parent: int) -> list[int]:
    """List the processes that a process has started. Baton's children start none, but for ranks."""
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for children in listed for pid in children.read_text().split()]


def _name(pid: int) -> str:
    """Tell the server from the module that a child runs."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    module = words[words.index("-m") + 1]
    return "server" if module == "baton.cli.main" else module


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _pss_bytes(pid: int) -> int:
    found, is_arena = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):  # the head of a mapping
            is_arena = any("baton-arena" in word for word in words)
        elif name == "Pss:" and not is_arena:
            found += int(words[0])
    return found * 1024


def command_figures(src: Path, arguments: tuple[str, ...]) -> dict[str, float]:
    """Run a command line once, to its end."""
    started_s = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": str(src), "PATH": "/usr/bin:/bin"},
    )
    _pid, _status, usage = os.wait4(process.pid, 0)
    return {"wall_s": perf_counter() - started_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def measured(versions: Mapping[str, Path], runs: int) -> dict[str, Any]:
    """Measure everything by turns: the versions of a row one after the other, row by row, again and again."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for _ in range(runs):
        for name, arguments in SERVERS.items():
            for version, src in versions.items():
                for figure, value in server_figures(src, arguments).items():
                    found[name][version][figure].append(value)
        for words in COMMAND_LINES:
            for version, src in versions.items():
                for figure, value in command_figures(src, words).items():
                    found["baton " + " ".join(words)][version][figure].append(value)
    return {
        name: {
            version: {figure: record.spread(values) for figure, values in figures.items()}
            for version, figures in row.items()
        }
        for name, row in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another version")
    args = parser.parse_args()
    versions = {"this": SRC} | ({"against": args.against.resolve()} if args.against is not None else {})
    record.write("start", {"what": "SmolLM2-135M-Instruct, float32", "rows": measured(versions, args.runs)})


if __name__ == "__main__":
    main()
