"""Measure grammars with SmolLM2's 49,152 tokens: compiling a schema, a mask, and consuming a token.

python benchmarks/grammars.py [--repeats 20]

Measures llguidance, which Baton uses, and xgrammar if it is installed. `step` is the time that a mask adds to sampling
one token: the thread that computes it, masking the logits, and the draw.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import record

from baton.compute.constrained import ConstrainedEngine
from baton.compute.models.grammar import token_trie
from baton.compute.models.grammar_masks import GrammarMasks
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sampler import sample_drafted
from baton.compute.sandbox.messages import MaskJob
from baton.compute.step_engine import Progress
from baton.core.config import SandboxConfig
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockId, Grammar, RequestId, Sampling

try:
    import xgrammar
except ImportError:
    xgrammar = None  # pip install xgrammar, to compare

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "home": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Löve 😀 lace", "age": 36, "tags": ["a", "c", "b"], "home": {"x": -3.25e4}}'
CARD = resolve_model("smollm2-135m")
TOKENIZER = load_tokenizer(CARD)
TOKENS = TOKENIZER.encode(TEXT, add_special=False)


def llguidance_s(repeats: int) -> dict[str, dict[str, float]]:
    """Return the seconds of compiling, of one mask, and of consuming a whole output again (a failover)."""
    started_s = time.perf_counter()
    trie = token_trie(TOKENIZER, vocab_tokens=CARD.vocab_tokens, eos_token_ids=CARD.eos_token_ids)
    vocabulary_s = time.perf_counter() - started_s
    compiled: list[float] = []
    masks: list[float] = []
    replayed: list[float] = []
    for _ in range(repeats):
        made = GrammarMasks(trie)
        times = [_timed_s(lambda count=count, made=made: made.answer(_job(count))) for count in range(len(TOKENS) + 1)]
        compiled.append(times[0] - times[1])
        masks += times[1:]
        other = GrammarMasks(trie)
        other.answer(_job(0))
        replayed.append(_timed_s(lambda other=other: other.answer(_job(len(TOKENS)))) / len(TOKENS))
    return {
        "vocabulary_s": record.spread([vocabulary_s]),
        "compile_s": record.spread(compiled),
        "token_s": record.spread(masks),
        "token_max_s": record.spread([max(masks)]),
        "replay_token_s": record.spread(replayed),
    }


def step_s(repeats: int) -> dict[str, dict[str, float]]:
    """Return the seconds of sampling one token from given logits, without and with a grammar."""
    logits = np.random.default_rng(0).standard_normal((1, CARD.vocab_tokens), dtype=np.float32)
    drawing = _Drawing(logits)
    engine = ConstrainedEngine(drawing, CARD, SandboxConfig())
    while engine.execute(Step((_part(3),))).slices[0].token is None:  # its sandbox starts
        pass
    return {
        name: record.spread(
            [_timed_s(lambda part=part: engine.execute(Step((part,)))) for _ in range(repeats) for part in parts]
        )
        for name, parts in (
            ("free", [_part(count, constrained=False) for count in range(len(TOKENS))]),
            ("constrained", [_part(count) for count in range(len(TOKENS))]),
        )
    }


def xgrammar_s(repeats: int) -> dict[str, dict[str, float]]:
    info = xgrammar.TokenizerInfo(
        [TOKENIZER.token_bytes(token) for token in range(CARD.vocab_tokens)],
        xgrammar.VocabType.RAW,
        vocab_size=CARD.vocab_tokens,
        stop_token_ids=list(CARD.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, CARD.vocab_tokens)
    compiled: list[float] = []
    masks: list[float] = []
    for _ in range(repeats):
        compiled.append(_timed_s(lambda: compiler.compile_json_schema(json.dumps(SCHEMA))))
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(SCHEMA)))
        for token in TOKENS:
            started_s = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            assert matcher.accept_token(token), TOKENIZER.token_text(token)
            masks.append(time.perf_counter() - started_s)
    return {
        "compile_s": record.spread(compiled),
        "token_s": record.spread(masks),
        "token_max_s": record.spread([max(masks)]),
    }


class _Drawing:
    """A step engine with given logits."""

    layout = CARD.layout(block_tokens=16, dtype="float32")
    progress = Progress()

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits

    def execute(self, step: Step) -> StepResult:
        drawn = sample_drafted(self._logits, step.slices)
        return StepResult([SliceResult(token=found[0][0] if found else None) for found in drawn])

    def warm_up(self) -> None:
        """Do nothing."""


def _job(count: int) -> MaskJob:
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    return MaskJob(request_id=RequestId("r"), grammar=grammar, output=TOKENS[:count])


def _part(count: int, *, constrained: bool = True) -> Slice:
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA)) if constrained else None
    return Slice(
        request_id=RequestId("r"),
        tokens=[1, *TOKENS[:count]],
        start=0,
        count=1 + count,
        block_table=[BlockId(0)],
        sample=True,
        sampling=Sampling(grammar=grammar, temperature=1.0, top_p=0.9),
        prompt_tokens=1,
    )


def _timed_s(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    figures = {"llguidance": llguidance_s(repeats), "step": step_s(repeats)}
    if xgrammar is not None:
        figures["xgrammar"] = xgrammar_s(repeats)
    record.write("grammars", {"tokens": len(TOKENS), **figures})


if __name__ == "__main__":
    main()
