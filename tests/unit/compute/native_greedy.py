"""Compute a greedy text with the native engine, without torch: `native_greedy MODEL LOAD_FORMAT DTYPE`.

Prints one line of JSON: the instruction set, the tokens, and the log probability of each.
"""

from __future__ import annotations

import json
import sys

from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine
from baton.core.config import LoadFormat
from baton.core.types import Sampling
from tests.unit.compute.steps import part_of, run

PROMPT = [1, 57, 12, 200, 33, 4, 91, 150, 7, 7, 64, 18, 240, 99, 5, 31, 76, 128, 2, 45]
OUTPUT_TOKENS = 12
BLOCKS = 4


def greedy(model: str, load_format: LoadFormat, dtype: str) -> dict[str, object]:
    """Return the instruction set, the tokens of the text and their log probabilities."""
    card = resolve_model(model, load_format)
    weights = "dense" if dtype in ("float32", "bfloat16") else "stored"
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    layout = card.layout(block_tokens=16, dtype=kind)
    library = NativeLibrary(library_path())
    arena = bytearray(b"\xff" * layout.block_bytes * BLOCKS)
    computation = Computation(dtype=kind, weights=weights, threads=2)
    engine = load_native_engine(card, layout, memoryview(arena), library, computation)
    tokens, logprobs, start = list(PROMPT), [], 0
    for _ in range(OUTPUT_TOKENS):
        sampling = Sampling(temperature=0.0, top_logprobs=1)
        (result,) = run(engine, part_of(tokens, range(BLOCKS), start=start, sampling=sampling))
        assert result.token is not None
        assert result.logprob is not None
        start = len(tokens)
        tokens.append(result.token)
        logprobs.append(result.logprob.logprob)
    return {"kernels": library.kernels, "tokens": tokens[len(PROMPT) :], "logprobs": logprobs}


if __name__ == "__main__":
    print(json.dumps(greedy(sys.argv[1], "dummy" if sys.argv[2] == "dummy" else "auto", sys.argv[3])))
