"""Measure speculative decoding: output tokens per second and per step, for texts that repeat their prompt or not.

python benchmarks/speculation.py [--repeats 3] [--dtype bfloat16] [--threads 2] [--requests 1 4 8]

The batcher and the engine run in this process, without a server. Each request answers another question of its kind.
Settings take turns, and figures are medians. `same_text`: whether every setting gave the same text, as an engine must
whose bits do not depend on the batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import record

from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.chat_template import ChatInput
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.config import BatchLimits, SandboxConfig, SpeculationConfig
from baton.core.messages import StartRequest
from baton.core.types import BlockId, HostId, Request, RequestId, Sampling, WorkerId, WorkerView, pack_tokens
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed
from baton.serve.worker.process import DRAFTED_TOKENS_MAX

OUTPUT_TOKENS, BLOCK_TOKENS = 120, 16
PARAGRAPH = (
    "The harbour lies on the north side of the bay. Fishing boats leave it before sunrise and come back at noon, when "
    "the market opens. In winter the wind keeps them in port for days, and the market sells what was salted in autumn."
)
CODE = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return width * height * depth\n"
)
QUESTIONS = {
    "repeats its prompt": f"Repeat this text word for word:\n\n{PARAGRAPH}",
    "edits code": f"Add a docstring to each function and write the whole file again:\n\n{CODE}",
    "free text": "Tell me a short story about a lighthouse.",
}
NAMES = ("Anna", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
"""Each asks the question."""


class House:
    """Runs some requests at a time through the real batcher."""

    def __init__(self, dtype: str, threads: int) -> None:
        self._card = resolve_model("smollm2-135m")
        self._layout = self._card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)  # type: ignore[arg-type]
        memory = memoryview(bytearray(self._layout.block_bytes * 256))
        self.choice = choose_engine(self._card, self._layout)
        self._engine = load_engine(
            self._card,
            self._layout,
            memory,
            dtype=dtype,
            threads=threads,
            choice=self.choice,  # type: ignore[arg-type]
        )
        self._engine.warm_up()
        self._tokenizer = load_tokenizer(self._card)
        self._batchers: dict[int, Batcher] = {}
        """By maximum drafted tokens. They learn the time of steps, as those of a server."""
        self._template = load_chat_template(self._card, SandboxConfig())

    def run(self, questions: Sequence[str], tokens_max: int) -> dict[str, Any]:
        """Answer some questions at once. Steps count while all of them decode."""
        batcher = self._batchers.setdefault(tokens_max, self._batcher(tokens_max))
        texts: dict[str, list[int]] = {}
        block = 0
        for question in questions:
            prompt = self._tokenizer.encode(
                self._template.render(ChatInput([{"role": "user", "content": question}])), add_special=False
            )
            request = Request(
                id=RequestId(question),
                prompt_tokens=len(prompt),
                output_tokens_max=OUTPUT_TOKENS,
                arrived_at_s=0.0,
                sampling=Sampling(temperature=0.0, stop_token_ids=()),
            )
            blocks = range(block, block - (-(len(prompt) + OUTPUT_TOKENS) // BLOCK_TOKENS))
            block, texts[question] = blocks.stop, []
            batcher.apply([StartRequest(request, 1, pack_tokens(prompt), "end", tuple(map(BlockId, blocks)))])
        steps = timed_tokens = drafted = accepted = 0
        timed_s = 0.0
        while True:
            started_s = time.perf_counter()
            step = batcher.plan(0.0)
            if not step.slices:
                break
            is_timed = all(texts.values()) and len(step.slices) == len(texts)
            batcher.commit(step, self._engine.execute(step))
            step_s = time.perf_counter() - started_s
            batcher.learner.observe(step.shape, step_s)
            report = batcher.take_report(now_s=0.0, step_s=step_s)
            assert report is not None
            for token in report.tokens:
                texts[token.request_id].append(token.token)
            if is_timed:
                steps, timed_s, timed_tokens = steps + 1, timed_s + step_s, timed_tokens + len(report.tokens)
                drafted, accepted = drafted + report.drafted_tokens, accepted + report.accepted_tokens
        return {
            "text": [tuple(text) for text in texts.values()],
            "tokens_per_s": timed_tokens / timed_s,
            "tokens_per_step": timed_tokens / steps,
            "drafted_per_step": drafted / steps,
            "accepted_ratio": accepted / max(1, drafted),
        }

    def _batcher(self, tokens_max: int) -> Batcher:
        rules = BatcherPolicies(
            batching=MixedChunked(),
            fairness=FirstComeFirstServed(),
            cost=LinearCost(),
            speculation=SpeculationConfig(tokens_max=tokens_max),
        )
        view = WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed")
        return Batcher(view, block_tokens=BLOCK_TOKENS, limits=BatchLimits(), policies=rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8], help=f"at most {len(NAMES)}")
    arguments = parser.parse_args()
    house = House(arguments.dtype, arguments.threads)
    figures: dict[str, Any] = {}
    for kind, question in QUESTIONS.items():
        for count in arguments.requests:
            questions = [f"{name}: {question}" for name in NAMES[:count]]
            runs: dict[int, list[dict[str, Any]]] = {tokens_max: [] for tokens_max in (0, DRAFTED_TOKENS_MAX)}
            for _ in range(arguments.repeats):
                for tokens_max, found in runs.items():
                    found.append(house.run(questions, tokens_max))
            texts = {tuple(result["text"]) for found in runs.values() for result in found}
            figures.setdefault(kind, {})[f"{count}"] = {"same_text": len(texts) == 1} | {
                f"tokens_max {tokens_max}": {
                    name: statistics.median(result[name] for result in found)
                    for name in ("tokens_per_s", "tokens_per_step", "drafted_per_step", "accepted_ratio")
                }
                for tokens_max, found in runs.items()
            }
            print(kind, count, figures[kind][f"{count}"], flush=True)
    settings = {"engine": str(house.choice.kind), "dtype": arguments.dtype, "threads": arguments.threads}
    record.write("speculation", {**settings, "texts": figures})


if __name__ == "__main__":
    main()
