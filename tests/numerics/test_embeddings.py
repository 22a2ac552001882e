"""The embedding of a prompt is the final hidden state of its last token, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from baton.compute.models.resolve import resolve_model
from baton.core.types import Sampling
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.compute.models import engine_of, part_of, run, tiny_model

EMBED = Sampling(temperature=0.0, embedding=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama_tied", None),
        ("llama_tied", "torch"),
        ("qwen2moe", None),
        ("qwen2moe", "torch"),
        ("deepseek3", None),
        ("deepseek3", "torch"),
    ],
)
def test_the_vector_equals_the_last_hidden_state(name: str, kind: Literal["torch"] | None, tmp_path: Path) -> None:
    """In one chunk, in several, and with requests that want no embedding."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    engine, _ = engine_of(card, kind=kind)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([TOKENS])).last_hidden_state[0, -1].numpy()
    expected = hidden / np.linalg.norm(hidden)
    whole = run(engine, part_of(TOKENS[:9], range(20, 23)), part_of(TOKENS, range(18), sampling=EMBED))
    assert whole[0].embedding == b""
    assert run(engine, part_of(TOKENS, range(30, 48), end=41, sampling=EMBED))[0].embedding == b""
    chunked = run(engine, part_of(TOKENS, range(30, 48), start=41, sampling=EMBED))
    for found in (whole[1], chunked[0]):
        vector = np.frombuffer(found.embedding, dtype="<f4")
        assert len(vector) == card.embedding_dim
        np.testing.assert_allclose(vector, expected, atol=2e-5, rtol=0)
