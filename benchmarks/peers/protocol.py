"""What a peer process is told and what it answers: one JSON object a line, on its own standard input and output.

Runs under the peer's Python, so it needs nothing but the standard library. The peer owns both cores while it answers,
and is stopped (SIGSTOP) between its turns: no thread of it spins while another is measured.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

VOCAB_TOKENS = 49000
"""Random prompts are drawn from the ordinary tokens of SmolLM2's vocabulary."""


@dataclass(frozen=True)
class Job:
    """What a peer loads."""

    model: str
    """A folder or a file in the peer's own format."""
    weights: str
    """`float32`, `bfloat16`, `int8` or `int4`: what the comparison is made at."""
    context_tokens: int
    """Tokens of a request before its decode steps are measured."""
    steps: int
    """Decode steps that are measured in one turn."""
    batch_max: int
    threads: int


class Peer(Protocol):
    """An engine under measurement. Times are seconds of one process that owns the machine."""

    version: str

    def prefill(self, prompt: list[int]) -> float:
        """Compute a prompt that nothing is cached of, up to its first token. Returns seconds."""
        ...

    def decode(self, prompts: list[list[int]]) -> list[float]:
        """Decode all prompts in one batch, `steps` steps. Returns the seconds of each step."""
        ...


def serve(open_peer: Callable[[Job], Peer]) -> None:
    """Answer on standard output until standard input ends. What the peer prints itself goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.stdin.readline()))
    peer = open_peer(job)
    rng = random.Random(1)
    prompts = [draw(random.Random(seed), job.context_tokens) for seed in range(job.batch_max)]
    peer.prefill(draw(rng, 64))
    answers.write(json.dumps({"version": peer.version}) + "\n")
    for line in sys.stdin:
        case: dict[str, Any] = json.loads(line)
        if case["kind"] == "prefill":
            seconds = [peer.prefill(draw(rng, case["size"]))]
        else:
            seconds = peer.decode(prompts[: case["size"]])
        answers.write(json.dumps({"seconds": seconds}) + "\n")


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, VOCAB_TOKENS) for _ in range(count)]
