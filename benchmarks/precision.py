"""Compare precisions of weights and KV: perplexity, greedy agreement, memory and time.

python benchmarks/precision.py [--tokens 1024] [--steps 48] [--threads 2] [--only fp8]

The text is part of Python: docstrings of modules of the standard library, in the order of MODULES.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import record

from baton.compute.cost_estimates import weights_bytes
from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.step_engine import StepEngine
from baton.core.config import WeightsChoice
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockHash, BlockId, RequestId, Sampling
from baton.decide.kv.layout import KVDtype, KVLayout
from baton.decide.kv.packing import Packing
from baton.move.store.memory import MemoryStore
from baton.move.store.packed import PackedStore

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
MODULES = ("argparse", "decimal", "difflib", "doctest", "pickletools", "turtle", "zipfile", "statistics", "typing")


@dataclass(frozen=True)
class Form:
    """The types of weights, products and KV."""

    weights: WeightsChoice
    dtype: Dtype
    kv: KVDtype
    prefill: WeightsChoice | None = None
    """Weights that compute prompts, and the first half of the text. None: the same."""
    tier: KVDtype | None = None
    """Type to which the KV of a prompt, and of each chunk of the text, was rounded in a tier. None: it was not."""
    exact_layers: int = 0
    """Layers that the tier keeps."""

    @property
    def kv_name(self) -> str:
        spared = f", {self.exact_layers} layers exact" if self.exact_layers else ""
        return self.kv if self.tier is None else f"{self.kv}, read from a tier in {self.tier}{spared}"

    @property
    def weights_name(self) -> str:
        return self.weights if self.prefill is None else f"{self.prefill} in prefill, {self.weights} in decode"


FORMS = (
    Form("dense", "float32", "float32"),
    Form("dense", "bfloat16", "bfloat16"),
    Form("int8", "bfloat16", "bfloat16"),
    Form("fp8", "bfloat16", "bfloat16"),
    Form("stored", "bfloat16", "bfloat16"),
    Form("stored", "bfloat16", "bfloat16", prefill="dense"),
    Form("stored", "bfloat16", "int8"),
    Form("stored", "bfloat16", "fp8"),
    Form("stored", "bfloat16", "fp4"),
    Form("stored", "bfloat16", "mxfp4"),
    Form("dense", "bfloat16", "bfloat16", tier="int8"),
    Form("dense", "bfloat16", "bfloat16", tier="fp4"),
    Form("dense", "bfloat16", "bfloat16", tier="mxfp4"),
    Form("dense", "bfloat16", "bfloat16", tier="mxfp4", exact_layers=4),
    Form("dense", "bfloat16", "bfloat16", tier="mxfp4", exact_layers=10),
)
"""The others are compared with the first."""


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

    def __init__(self, card: ModelCard, form: Form, tokens: int, threads: int) -> None:
        self.layout: KVLayout = card.layout(block_tokens=BLOCK_TOKENS, dtype=form.kv)
        self._table = [BlockId(block) for block in range(-(-tokens // BLOCK_TOKENS))]
        self._arena = bytearray(self.layout.block_bytes * len(self._table))
        self._engine = self._load(card, form, form.weights, threads)
        self._prefill = self._engine if form.prefill is None else self._load(card, form, form.prefill, threads)
        self._tier: PackedStore | None = None
        self.tier_token_bytes = self.layout.token_bytes
        if form.tier is not None:
            packing = Packing(self.layout, form.tier, form.exact_layers)
            capacity_bytes = packing.block_bytes * len(self._table)
            self._tier = PackedStore(
                MemoryStore(block_bytes=packing.block_bytes, capacity_bytes=capacity_bytes), packing
            )
            self.tier_token_bytes = packing.block_bytes // BLOCK_TOKENS

    def _load(self, card: ModelCard, form: Form, weights: WeightsChoice, threads: int) -> StepEngine:
        choice = choose_engine(card, self.layout, weights=weights)
        return load_engine(card, self.layout, memoryview(self._arena), dtype=form.dtype, threads=threads, choice=choice)

    def _round(self, tokens: int) -> None:
        """Write the KV of the first tokens to the tier, and read it back."""
        if self._tier is None:
            return
        size = self.layout.block_bytes
        views = [memoryview(self._arena)[at * size : (at + 1) * size] for at in range(-(-tokens // BLOCK_TOKENS))]
        blocks = [(BlockHash(number.to_bytes(8)), view) for number, view in enumerate(views)]
        self._tier.drop([name for name, _ in blocks])
        assert all(self._tier.put(blocks))
        assert all(self._tier.get(blocks))

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
        if part.count == 1:
            return self._engine.execute(Step((part,))).slices[0]
        result = self._prefill.execute(Step((part,))).slices[0]
        self._round(len(tokens))
        return result

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
            engine = self._prefill if start < len(tokens) // 2 else self._engine
            result = engine.execute(Step((part,))).slices[0]
            self._round(len(seen))
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
    weight_bytes = {
        "dense": {"float32": 538e6, "bfloat16": 269e6}, "int8": 134.9e6, "stored": card.weight_bytes,
        "fp8": weights_bytes(card, "bfloat16", "fp8"),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for form in [form for form in FORMS if args.only is None or form in FORMS[:2] or form.weights == args.only]:
        engine = Measured(card, form, args.tokens + args.steps + 64, args.threads)
        perplexity = engine.perplexity(text)
        outputs, times = zip(*[engine.greedy(prompt, args.steps) for prompt in prompts], strict=True)
        expected = expected or list(outputs)
        told = [
            engine.forced([*prompt, *wanted], len(prompt)) for prompt, wanted in zip(prompts, expected, strict=True)
        ]
        same = [a == b for mine, wanted in zip(told, expected, strict=True) for a, b in zip(mine, wanted, strict=True)]
        sizes = [weight_bytes[weights] for weights in {form.weights, form.prefill or form.weights}]
        held_bytes = sum(size[form.dtype] if isinstance(size, dict) else size for size in sizes)
        rows.append(
            {
                "weights": form.weights_name,
                "dtype": form.dtype,
                "kv": form.kv_name,
                "perplexity": perplexity,
                "greedy_agreement_ratio": float(np.mean(same)),
                "weight_bytes": held_bytes,
                "kv_token_bytes": engine.tier_token_bytes,
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
    parser.add_argument("--only", choices=get_args(WeightsChoice), help="weights to compare with the first two forms")
    args = parser.parse_args()
    rows = measure(args)
    text = f"docstrings of Python's {', '.join(MODULES)}: the first {args.tokens} tokens"
    name = "precision" if args.only is None else f"precision-{args.only}"
    record.write(name, {"text": text, "rows": rows, "table": table(rows)})


if __name__ == "__main__":
    main()
