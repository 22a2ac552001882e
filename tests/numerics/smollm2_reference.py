"""The embedded model in transformers, and its texts for `PROMPTS`, stored because they take more than a minute.

`python -m tests.numerics.smollm2_reference` computes and stores them. A deep test compares them with new ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from baton.compute.models.resolve import resolve_model
from tests.numerics.prompts import PROMPTS

OUTPUT_TOKENS = 8
FILE = Path(__file__).parents[1] / "data" / "smollm2_greedy_texts.json"

Texts = dict[str, tuple[str, int]]
"""The text and the number of its tokens, by the name of the prompt."""


def load_model() -> transformers.PreTrainedModel:
    """Load SmolLM2-135M in float32, read from the same GGUF file by transformers.

    transformers reads the file twice and builds the same map of names for every tensor: half of its time.
    """
    path = Path(resolve_model("smollm2-135m").path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def load_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of SmolLM2-135M, read from the GGUF file by transformers."""
    path = Path(resolve_model("smollm2-135m").path)
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def read_texts() -> Texts:
    """Return the stored texts. Raises AssertionError if they belong to another model or other prompts."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert stored["inputs"] == _inputs(), "run python -m tests.numerics.smollm2_reference"
    return {name: (text, count) for name, (text, count) in stored["texts"].items()}


def compute_texts(reference: transformers.PreTrainedModel) -> Texts:
    """Return the greedy texts of transformers with the same dequantized weights in float32."""
    tokenizer = load_tokenizer()
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt.text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            out = reference.generate(**ids, max_new_tokens=OUTPUT_TOKENS, do_sample=False, repetition_penalty=1.0)
        new = out[0, ids["input_ids"].shape[1] :]
        texts[prompt.name] = (tokenizer.decode(new, skip_special_tokens=True), len(new))
    return texts


def _inputs() -> str:
    """Return the digest of all that the texts depend on: the weights, the prompts and the number of tokens."""
    digest = hashlib.sha256(Path(resolve_model("smollm2-135m").path).read_bytes())
    digest.update(repr((OUTPUT_TOKENS, [(prompt.name, prompt.text) for prompt in PROMPTS])).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    contents = {"inputs": _inputs(), "texts": compute_texts(load_model())}
    FILE.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
