"""Measure speculative decoding: output tokens per second and per step of one request, for texts that repeat or not.

python benchmarks/speculation.py [--repeats 3] [--dtype bfloat16] [--threads 2]

The batcher and the engine run in this process, without a server. Settings take turns, and figures are medians.
`same_text`: whether every setting gave the same text, as an engine must whose bits do not depend on the batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
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


class House:
    """Runs one request at a time through the real batcher."""

    def __init__(self, dtype: str, threads: int) -> None:
        self._card = resolve_model("smollm2-135m")
        self._layout = self._card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)  # type: ignore[arg-type]
        memory = memoryview(bytearray(self._layout.block_bytes * 64))
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
        self._template = load_chat_template(self._card, SandboxConfig())

    def run(self, question: str, tokens_max: int, sampling: Sampling) -> dict[str, Any]:
        """Answer one question. Times start at the first token, without the prompt."""
        prompt = self._tokenizer.encode(
            self._template.render(ChatInput([{"role": "user", "content": question}])), add_special=False
        )
        batcher = self._batcher(tokens_max)
        request = Request(
            id=RequestId("r"),
            prompt_tokens=len(prompt),
            output_tokens_max=OUTPUT_TOKENS,
            arrived_at_s=0.0,
            sampling=sampling,
        )
        blocks = tuple(BlockId(block) for block in range(-(-(len(prompt) + OUTPUT_TOKENS) // BLOCK_TOKENS)))
        batcher.apply([StartRequest(request, 1, pack_tokens(prompt), "end", blocks)])
        text: list[int] = []
        steps = drafted = accepted = 0
        started_s = 0.0
        while (step := batcher.plan()).slices:
            batcher.commit(step, self._engine.execute(step))
            report = batcher.take_report(now_s=0.0, step_s=1.0)
            assert report is not None
            started_s = started_s or time.perf_counter()
            steps += bool(text)
            text += [token.token for token in report.tokens]
            drafted += report.drafted_tokens
            accepted += report.accepted_tokens
        tokens_per_s = (len(text) - 1) / (time.perf_counter() - started_s)
        return {
            "text": text,
            "tokens_per_s": tokens_per_s,
            "tokens_per_step": (len(text) - 1) / max(1, steps),
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
    arguments = parser.parse_args()
    house = House(arguments.dtype, arguments.threads)
    stop = Sampling(temperature=0.0, stop_token_ids=())
    figures: dict[str, Any] = {}
    for kind, question in QUESTIONS.items():
        runs: dict[int, list[dict[str, Any]]] = {tokens_max: [] for tokens_max in (0, 4, 8)}
        for _ in range(arguments.repeats):
            for tokens_max, found in runs.items():
                found.append(house.run(question, tokens_max, stop))
        texts = {tuple(result["text"]) for found in runs.values() for result in found}
        figures[kind] = {"same_text": len(texts) == 1} | {
            f"tokens_max {tokens_max}": {
                name: statistics.median(result[name] for result in found)
                for name in ("tokens_per_s", "tokens_per_step", "accepted_ratio")
            }
            for tokens_max, found in runs.items()
        }
    settings = {"engine": str(house.choice.kind), "dtype": arguments.dtype, "threads": arguments.threads}
    record.write("speculation", {**settings, "texts": figures})


if __name__ == "__main__":
    main()
