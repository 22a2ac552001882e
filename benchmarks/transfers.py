"""How long the KV of a handoff takes over each way, beside one plain copy of the same bytes in memory.

python benchmarks/transfers.py [--tokens 512 2048 7500 32000] [--bytes-max 4.3e9] [--repeats 7]
    [--ways reference shm tcp tls baton-nixl nixl nixl-tcp mooncake] [--peer-python VENV/bin/python] [--no-links]
    [--name transfers]

Every way is a pair of processes over the same two memories; repeats go round the ways in turn. Blocks are of 16 tokens,
in shuffled order on both sides, unless the row says otherwise. `nixl` and `mooncake` are driven directly, by the Python
that has them: pip install numpy nixl-cu12 mooncake-transfer-engine-non-cuda. As root with iproute2, the pairs are run
again in two network namespaces with a shaped wire between them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record

END = Path(__file__).parent / "_transfer_ways.py"
PEERS = ("nixl", "nixl-tcp", "mooncake")
ELSEWHERE = ("baton-nixl", *PEERS)
"""What the peers' Python runs: `baton-nixl` is Baton's transport over NIXL."""

WAYS = ("reference", "shm", "tcp", "tls", "baton-nixl", *PEERS)
"""`tls` is the encrypted `tcp`. Both may end in a number of connections, such as `tls2`."""
LINK_WAYS = ("tcp", "tls", "nixl-tcp", "mooncake")
SPACES = ("baton-bench-a", "baton-bench-b")
HOSTS = ("10.231.7.1", "10.231.7.2")
Run = tuple[int, int]


@dataclass(frozen=True)
class Model:
    """What decides how many bytes a token's KV has."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2  # keys and values, in bfloat16


MODELS = (Model("SmolLM2-135M", 30, 3, 64), Model("Llama-3.1-8B", 32, 8, 128))


@dataclass(frozen=True)
class Case:
    """One transfer: pieces of one size, on both sides in another order."""

    name: str
    model: str
    tokens: int
    piece_bytes: int
    pieces: int
    adjacent: bool

    @property
    def total_bytes(self) -> int:
        return self.piece_bytes * self.pieces

    def runs(self, seed: int) -> list[Run]:
        order = list(range(self.pieces))
        if not self.adjacent:
            random.Random(seed).shuffle(order)
        return [(index * self.piece_bytes, self.piece_bytes) for index in order]


def sizes(tokens: Sequence[int], bytes_max: int) -> list[Case]:
    """KV of prompts, in blocks of 16 tokens."""
    found = []
    for model in MODELS:
        for count in tokens:
            blocks = count // 16
            if count * model.token_bytes <= bytes_max:
                name = f"{model.name}, {count} tokens"
                found.append(Case(name, model.name, count, 16 * model.token_bytes, blocks, adjacent=False))
    return found


def cuts(tokens: int, bytes_max: int) -> list[Case]:
    """One prompt in blocks of 8 to 128 tokens: scattered, adjacent (collated), and scattered layer by layer."""
    found = []
    for model in MODELS:
        if tokens * model.token_bytes > bytes_max:
            continue
        for block_tokens in (8, 16, 32, 64, 128):
            blocks, block_bytes = tokens // block_tokens, block_tokens * model.token_bytes
            name = f"{model.name}, {tokens} tokens, blocks of {block_tokens}"
            found.append(Case(f"{name}, scattered", model.name, tokens, block_bytes, blocks, adjacent=False))
            found.append(Case(f"{name}, adjacent", model.name, tokens, block_bytes, blocks, adjacent=True))
            planes = 2 * model.layers
            layered = Case(
                f"{name}, by layer", model.name, tokens, block_bytes // planes, blocks * planes, adjacent=False
            )
            found.append(layered)
    return found


class End:
    """One end of a way, in its own process."""

    def __init__(self, way: str, command: Sequence[str], descriptors: Sequence[int]) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), MC_LOG_LEVEL="ERROR", UCX_MODULES="cma")
        if way == "nixl-tcp":
            environment["UCX_TLS"] = "tcp"
        self._process = subprocess.Popen(
            [*command, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            text=True,
            env=environment,
        )
        self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print there too
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}")

    def ask(self, do: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **(more or {})}) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """Both ends of one way."""

    def __init__(self, way: str, python: str, descriptors: Sequence[int], *, spaces: bool = False) -> None:
        hosts = HOSTS if spaces else ("127.0.0.1", "127.0.0.1")
        prefixes = [["ip", "netns", "exec", space] for space in SPACES] if spaces else [[], []]
        self.name = way
        self._descriptors = descriptors
        self._commands = [
            [*prefix, python, str(END), way, role, host]
            for prefix, role, host in zip(prefixes, ("source", "consumer"), hosts, strict=True)
        ]
        self._start()

    def _start(self) -> None:
        self.source, self.consumer = (End(self.name, command, self._descriptors) for command in self._commands)

    def pull_s(self, case: Case) -> float | None:
        """Pull it once. None: this way cannot do it, and said so."""
        ticket = self.source.ask("offer", {"runs": case.runs(1)})
        self.source.ask("poll")
        answer = self.consumer.ask("pull", {"ticket": ticket, "runs": case.runs(2)})
        self.source.ask("rest")
        if "failed" in answer:
            print(f"{self.name}: {case.name}: {answer['failed']}", file=sys.stderr)
            self.close()  # an engine that has failed once may fail for ever
            self._start()
        return answer.get("took_s")

    def close(self) -> None:
        self.consumer.close()
        self.source.close()


class Memories:
    """What all processes map: one memory to read, one to write."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptors = []
        for name in ("source", "target"):
            descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.descriptors.append(descriptor)
        self.source, self.target = (np.memmap(f"/proc/self/fd/{fd}", np.uint8, "r+") for fd in self.descriptors)
        rng = np.random.default_rng(0)
        for start in range(0, size_bytes, 1 << 24):
            part = self.source[start : start + (1 << 24)]
            part[:] = rng.integers(0, 256, part.size, np.uint8)

    def check(self, case: Case) -> None:
        """What came is what was offered, in order."""
        for (theirs, size), (ours, _) in zip(case.runs(1), case.runs(2), strict=True):
            if not np.array_equal(self.source[theirs : theirs + size], self.target[ours : ours + size]):
                raise RuntimeError(f"{case.name}: wrong bytes at {ours}")


def measure(pairs: Sequence[Pair], cases: Sequence[Case], memories: Memories, repeats: int) -> dict[str, Any]:
    """Go round the ways, and say for each how long it took and how it compares with the plain copy."""
    figures: dict[str, Any] = {}
    for case in cases:
        seen: dict[str, list[float]] = {pair.name: [] for pair in pairs}
        able = list(pairs)
        for attempt in range(repeats + 1):
            for pair in list(able):
                moves = pair.name not in ("memcpy", "reference")
                if attempt == 0 and moves:
                    memories.target[: case.total_bytes] = 0
                took_s = pair.pull_s(case)
                if took_s is None:
                    able.remove(pair)
                elif attempt:
                    seen[pair.name].append(took_s)
                elif moves:
                    memories.check(case)
        figures[case.name] = summary(case, seen)
        shown = {
            name: row if isinstance(row, str) else row["shown"] for name, row in figures[case.name]["ways"].items()
        }
        print(case.name, shown, file=sys.stderr)
    return figures


def summary(case: Case, seen: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, rates, and times of the plain copy."""
    spreads = {name: record.spread(values) for name, values in seen.items() if values}
    ways: dict[str, Any] = dict.fromkeys(seen, "failed")
    for name, spread in spreads.items():
        rate = f"{case.total_bytes / spread['median'] / 1e9:.2f} GB/s" if name != "reference" else "no bytes moved"
        ways[name] = {"seconds": spread, "shown": rate}
        if "memcpy" in spreads:
            ways[name]["times_memcpy"] = round(spread["median"] / spreads["memcpy"]["median"], 3)
    return {"bytes": case.total_bytes, "pieces": case.pieces, "piece_bytes": case.piece_bytes, "ways": ways}


def shown(figures: dict[str, Any], ways: Sequence[str]) -> str:
    """GB/s of each way, a line for each transfer, as a table of the documents."""
    lines = []
    for case, row in figures.items():
        found = [row["ways"].get(way, "-") for way in ways]
        lines.append(
            [case, *(each if isinstance(each, str) else each["shown"].removesuffix(" GB/s") for each in found)]
        )
    return record.table(["GB/s", *ways], lines)


def can_shape() -> str | None:
    """Say what is missing for shaped links. None: nothing."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} (iproute2)" if missing else None


@contextmanager
def shaped_link(rate: str, burst: str) -> Iterator[None]:
    """Two network namespaces with one wire between them. `burst`: what passes unshaped, about a millisecond of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces would outlive us
    try:
        for space in SPACES:
            _ip(f"netns add {space}")
        _ip(f"link add bench0 netns {SPACES[0]} type veth peer name bench1 netns {SPACES[1]}")
        for index, (space, host) in enumerate(zip(SPACES, HOSTS, strict=True)):
            _ip(f"-n {space} addr add {host}/24 dev bench{index}")
            _ip(f"-n {space} link set bench{index} up")
            _ip(f"-n {space} link set lo up")
            shape = f"qdisc add dev bench{index} root tbf rate {rate} burst {burst} latency 50ms"
            subprocess.run(["tc", "-n", space, *shape.split()], check=True)
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def opened(
    stack: ExitStack, ways: Sequence[str], peer_python: str | None, *, spaces: bool, fds: list[int]
) -> list[Pair]:
    """Start both ends of every way that there is a Python for."""
    pairs = []
    for way in ways:
        if way in ELSEWHERE and peer_python is None:
            continue
        pair = Pair(way, peer_python if way in ELSEWHERE and peer_python else sys.executable, fds, spaces=spaces)
        stack.callback(pair.close)
        pairs.append(pair)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 7500, 32000])
    parser.add_argument("--bytes-max", type=float, default=4.3e9)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--peer-python", help="a Python with nixl-cu12 and mooncake; without it they are left out")
    parser.add_argument("--no-links", action="store_true", help="no shaped links")
    parser.add_argument("--name", default="transfers", help="name of the result file")
    parser.add_argument("--cut-tokens", type=int, default=7500, help="length of the prompt that is cut in several ways")
    args = parser.parse_args()
    if args.cut_tokens < 128:
        parser.error("--cut-tokens must be at least 128, the longest block")
    cases = sizes(args.tokens, int(args.bytes_max))
    cut = cuts(args.cut_tokens, int(args.bytes_max))
    memories = Memories(max(case.total_bytes for case in [*cases, *cut]))
    fds = memories.descriptors
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        pairs = opened(stack, ["memcpy", *args.ways], args.peer_python, spaces=False, fds=fds)
        figures["one machine"] = measure(pairs, cases, memories, args.repeats)
        figures["cut"] = measure([pair for pair in pairs if pair.name != "reference"], cut, memories, args.repeats)
    missing = "--no-links" if args.no_links else can_shape()
    for rate, burst, bytes_max in (("25gbit", "3mb", 2e9), ("1gbit", "128kb", 3e8)):
        if missing:
            figures[f"link of {rate}"] = f"not run: {missing}"
            continue
        with ExitStack() as stack:
            stack.enter_context(shaped_link(rate, burst))
            ways = [way for way in LINK_WAYS if way in args.ways]
            pairs = opened(stack, ways, args.peer_python, spaces=True, fds=fds)
            few = [case for case in cases if case.total_bytes <= bytes_max]
            figures[f"link of {rate}"] = measure(pairs, few, memories, min(args.repeats, 3))
    ways = ["memcpy", *(way for way in args.ways if way != "reference")]
    for name, found in figures.items():
        print(f"{name}:", found if isinstance(found, str) else "\n" + shown(found, ways), file=sys.stderr)
    record.write(args.name, {"what": "KV of a prompt, blocks of 16 tokens shuffled on both sides", "figures": figures})


if __name__ == "__main__":
    main()
