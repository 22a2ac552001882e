"""Compare precisions of weights and KV: perplexity, greedy agreement, memory and time.

python benchmarks/precision.py [--tokens 1024] [--steps 48] [--threads 2]

The text is part of Python: docstrings of modules of the standard library, in the order of MODULES.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.step_engine import StepEngine
from baton.core.config import WeightsChoice
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.decide.kv.layout import KVDtype, KVLayout

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
MODULES = ("argparse", "decimal", "difflib", "doctest", "pickletools", "turtle", "zipfile", "statistics", "typing")
FORMS: tuple[tuple[WeightsChoice, str, KVDtype], ...] = (
    ("dense", "float32", "float32"),
    ("dense", "bfloat16", "bfloat16"),
    ("int8", "bfloat16", "bfloat16"),
    ("stored", "bfloat16", "bfloat16"),
    ("stored", "bfloat16", "int8"),
    ("stored", "bfloat16", "fp8"),
)
"""The types of weights, products and KV. The others are compared with the first."""


def docstrings() -> str:
    """Return every docstring of MODULES, without importing them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for name in MODULES:
        path = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(text for text in found if text)


class Measured:
    """One engine over its own arena, and a request that uses all of it."""

    def __init__(self, card: ModelCard, form: tuple[WeightsChoice, str, KVDtype], tokens: int, threads: int) -> None:
        weights, dtype, kv = form
        self.layout: KVLayout = card.layout(block_tokens=BLOCK_TOKENS, dtype=kv)
        self._table = [BlockId(block) for block in range(-(-tokens // BLOCK_TOKENS))]
        self._arena = bytearray(self.layout.block_bytes * len(self._table))
        choice = choose_engine(card, self.layout, weights=weights)
        self._engine: StepEngine = load_engine(
            card,
            self.layout,
            memoryview(self._arena),
            dtype=dtype,
            threads=threads,
            choice=choice,  # type: ignore[arg-type]
        )

    def step(self, tokens: list[int], start: int, sampling: Sampling, prompt_tokens: int) -> SliceResult:
        part = Slice(
            request_id=RequestId("measured"),
            tokens=tokens,
            start=start,
            count=len(tokens) - start,
            block_table=self._table,
            sample=True,
            sampling=sampling,
            prompt_tokens=prompt_tokens,
        )
        return self._engine.execute(Step((part,))).slices[0]

    def perplexity(self, tokens: list[int]) -> float:
        """Return the perplexity of all tokens but the first, computed in chunks."""
        surprises: list[float] = []
        for start in range(0, len(tokens), CHUNK_TOKENS):
            seen = tokens[: start + CHUNK_TOKENS]
            part = Slice(
                request_id=RequestId("measured"),
                tokens=tokens,
                start=start,
                count=len(seen) - start,
                block_table=self._table,
                sample=False,
                sampling=Sampling(temperature=0.0, prompt_logprobs=True),
                prompt_tokens=len(tokens),
            )
            result = self._engine.execute(Step((part,))).slices[0]
            surprises += [-entry.logprob for entry in result.prompt_logprobs]
        return math.exp(sum(surprises) / len(surprises))

    def greedy(self, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
        """Decode, and return the tokens and the seconds of each step."""
        text, times = list(prompt), []
        start = 0
        for _ in range(steps):
            started = time.perf_counter()
            result = self.step(text, start, Sampling(temperature=0.0), len(prompt))
            times.append(time.perf_counter() - started)
            start = len(text)
            text.append(result.token or 0)
        return text[len(prompt) :], times[1:]

    def forced(self, text: list[int], first: int) -> list[int]:
        """Return the greedy token at each position of a text from `first` on, with one step per token."""
        self.step(text[: first - 1], 0, Sampling(temperature=0.0), first)
        return [
            self.step(text[:end], end - 1, Sampling(temperature=0.0), first).token or 0
            for end in range(first, len(text))
        ]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    card = resolve_model("smollm2-135m")
    text = load_tokenizer(card).encode(docstrings())[: args.tokens]
    prompts = [text[at : at + 64] for at in range(0, len(text) - 64, max(64, len(text) // 4))][:4]
    weight_bytes = {"dense": {"float32": 538e6, "bfloat16": 269e6}, "int8": 134.9e6, "stored": card.weight_bytes}
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for form in FORMS:
        engine = Measured(card, form, args.tokens + args.steps + 64, args.threads)
        perplexity = engine.perplexity(text)
        outputs, times = zip(*[engine.greedy(prompt, args.steps) for prompt in prompts], strict=True)
        expected = expected or list(outputs)
        told = [
            engine.forced([*prompt, *wanted], len(prompt)) for prompt, wanted in zip(prompts, expected, strict=True)
        ]
        same = [a == b for mine, wanted in zip(told, expected, strict=True) for a, b in zip(mine, wanted, strict=True)]
        size = weight_bytes[form[0]]
        rows.append(
            {
                "weights": form[0],
                "dtype": form[1],
                "kv": form[2],
                "perplexity": perplexity,
                "greedy_agreement_ratio": float(np.mean(same)),
                "weight_bytes": size[form[1]] if isinstance(size, dict) else size,
                "kv_token_bytes": engine.layout.token_bytes,
                "decode_step_s": {"least": min(map(min, times)), "median": float(np.median(np.concatenate(times)))},
            }
        )
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table."""
    lines = ["| weights | computed in | KV | perplexity | greedy agreement | weights, MB | KV, KB/token | decode, ms |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            row["weights"],
            row["dtype"],
            row["kv"],
            f"{row['perplexity']:.3f}",
            f"{row['greedy_agreement_ratio']:.1%}",
            f"{row['weight_bytes'] / 1e6:.0f}",
            f"{row['kv_token_bytes'] / 1e3:.1f}",
            f"{row['decode_step_s']['least'] * 1e3:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of the text")
    parser.add_argument("--steps", type=int, default=48, help="decoded after each of four prompts of 64 tokens")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = measure(args)
    text = f"docstrings of Python's {', '.join(MODULES)}: the first {args.tokens} tokens"
    record.write("precision", {"text": text, "rows": rows, "table": table(rows)})


if __name__ == "__main__":
    main()
