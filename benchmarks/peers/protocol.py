"""The messages with a peer process: one JSON object per line on its standard input and output.

It runs under the peer's Python, so it only needs the standard library. A peer has all cores while it answers, and is
stopped (SIGSTOP) between its turns, so that its threads do not spin while another peer is measured.
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
"""The ordinary tokens of SmolLM2's vocabulary, for random prompts."""


@dataclass(frozen=True)
class Job:
    """The model and the cases of a peer."""

    model: str
    """A folder or a file in the peer's format."""
    weights: str
    """The precision of weights: `float32`, `bfloat16`, `int8` or `int4`."""
    context_tokens: int
    """The prompt tokens of a request whose decode steps are measured."""
    prompt_tokens_max: int
    """The longest prompt of a prefill or a decode step, at least 4,096."""
    steps: int
    """The decode steps measured in one turn."""
    batch_max: int
    threads: int


class Peer(Protocol):
    """A measured engine. Times are seconds of a process that has the machine for itself."""

    version: str

    def prefill(self, prompt: list[int]) -> float:
        """Compute a prompt that is not cached, up to its first token. Return seconds."""
        ...

    def decode(self, prompts: list[list[int]]) -> list[float]:
        """Decode all prompts in one batch for `steps` steps. Return the seconds of each step."""
        ...


def serve(open_peer: Callable[[Job], Peer]) -> None:
    """Answer on standard output until standard input ends. Other output of the peer goes to standard error."""
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
