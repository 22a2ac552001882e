"""`--load-format dummy`: random weights in the shapes of a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from baton.compute.models.chat_template import ChatInput
from baton.compute.models.fingerprint import kv_identity
from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.config import SandboxConfig
from baton.core.errors import ModelError
from tests.dummies import SHAPES, small
from tests.unit.compute.models import engine_of, generate

PARAMETERS = {"llama-3.1-8b": 8.03e9, "qwen3-30b-a3b": 30.53e9, "deepseek-v2-lite": 15.71e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shipped_shapes_have_the_published_size(name: str) -> None:
    card = resolve_model(str(SHAPES / name), "dummy")
    assert card.weight_bytes / 2 == pytest.approx(PARAMETERS[name], rel=0.002)
    assert card.name == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_engines_compute_the_same_tokens(name: str, tmp_path: Path) -> None:
    """The weights do not depend on the engine or the process, and are not all alike."""
    card = resolve_model(small(name, tmp_path), "dummy")
    assert card.format == "dummy"
    texts = [generate(engine_of(card, kind=kind)[0], range(5, 25), range(12), 8) for kind in ("torch", None)]
    assert texts[0] == texts[1]
    _, weights = open_model(card)
    gates = [weights.read(f"model.layers.{layer}.input_layernorm.weight") for layer in range(2)]
    assert {str(gate.tobytes()) for gate in gates} == {str(np.full(32, 0x3F80, np.uint16).tobytes())}
    table = weights.read("model.embed_tokens.weight")
    assert len({row.tobytes() for row in table}) == len(table) == 300
    assert kv_identity(card) == kv_identity(card)


def test_without_a_tokenizer_texts_are_bytes(tmp_path: Path) -> None:
    """Completions and chats work."""
    card = resolve_model(small("llama-3.1-8b", tmp_path), "dummy")
    tokenizer = load_tokenizer(card)
    assert tokenizer.decode(tokenizer.encode("5 €")) == "5 €"
    assert "hello" in load_chat_template(card, SandboxConfig()).render(
        ChatInput([{"role": "user", "content": "hello"}])
    )


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"needs a folder with config.json, .* examples/shapes"):
        resolve_model(str(tmp_path), "dummy")
    folder = small("llama-3.1-8b", tmp_path)
    with pytest.raises(ModelError, match="for random weights: --load-format dummy"):
        resolve_model(folder)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(ModelError, match=r"its 200 tokens are too few .* set vocab_size"):
        load_tokenizer(resolve_model(folder, "dummy"))
