"""The torch engine over a tensor gives the text and log probabilities of the host. On a GPU: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from baton.compute.attention_choice import attention_problem
from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Precision
from baton.compute.models.resolve import resolve_model
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.load_torch import TorchComputation, load_torch_engine
from baton.core.config import AttentionName
from baton.core.errors import ModelError
from tests.attention_cases import TORCH_WARNINGS
from tests.dummies import small
from tests.unit.compute.models import VOCAB, all_logprobs, engine_of, generate, tiny_llama

BLOCKS, BLOCK_TOKENS = 64, 4
PROMPT = [5, 17, 42, 8, 8, 90, 33, 61, 12, 77, 4, 29, 55, 3, 68, 20, 91]
TOLERANCE = 2e-3
"""The largest difference of a log probability, in float32 with other kernels and without TF32."""


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return resolve_model(str(folder))


def _on(device: str, card: ModelCard) -> TorchEngine:
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    arena = torch.full((layout.block_bytes * BLOCKS,), 0xFF, dtype=torch.uint8, device=device)  # NaN everywhere
    return load_torch_engine(card, layout, arena, TorchComputation(dtype="float32", threads=1, device=device))


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("attention", ["jagged", "reference", pytest.param("flex", marks=pytest.mark.deep)])
def test_each_attention_backend_gives_the_text_of_the_default(card: ModelCard, attention: AttentionName) -> None:
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    choice = choose_engine(card, layout, attention=attention)
    assert (choice.kind, choice.attention) == ("torch", attention)
    assert f"{attention} attention" in str(choice)
    arena = bytearray(b"\xff" * layout.block_bytes * BLOCKS)
    engine = load_engine(card, layout, memoryview(arena), threads=1, choice=choice)
    counters["stats"].clear()
    engine.warm_up()
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == (2 if attention == "flex" else 0)
    assert generate(engine, PROMPT, range(16), 20) == generate(_on("cpu", card), PROMPT, range(16), 20)
    assert counters["stats"]["unique_graphs"] == compiled, "a step of a request waited for the compiler"


@pytest.mark.parametrize(
    ("attention", "device", "words"),
    [
        ("triton", "cpu", "triton needs a GPU; use --attention-backend sdpa"),
        ("persistent", "cpu", "persistent needs a GPU; use --attention-backend sdpa"),
        ("fused", "cpu", "fused needs a GPU; use --attention-backend sdpa"),
        ("native", "cuda:0", "native cannot be used: .* the device is cuda:0; use --attention-backend triton"),
    ],
)
def test_a_refused_attention_backend_names_another(
    card: ModelCard, attention: AttentionName, device: str, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        choose_engine(card, card.layout(block_tokens=16, dtype="float32"), device=device, attention=attention)


def test_fused_attention_refuses_latents(tmp_path: Path) -> None:
    latent = resolve_model(small("deepseek-v2-lite", tmp_path), "dummy")
    layout = latent.layout(block_tokens=16, dtype="bfloat16")
    with pytest.raises(ModelError, match="fused is not for latent attention; use --attention-backend triton"):
        choose_engine(latent, layout, device="cuda:0", attention="fused")
    assert "use --attention-backend triton" in attention_problem(
        latent, layout, "cuda:0", "fused", Precision("bfloat16", "dense")
    )


def test_flex_attention_refuses_kv_of_another_type(card: ModelCard) -> None:
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="bfloat16")
    computation = TorchComputation(dtype="float32", threads=1, device="cpu", attention="flex")
    with pytest.raises(ModelError, match=r"KV is bfloat16 and the computation float32; .* --attention-backend sdpa"):
        load_torch_engine(card, layout, memoryview(bytearray(layout.block_bytes)), computation)


def test_a_tensor_gives_the_results_of_the_host(card: ModelCard) -> None:
    ours, host = _on("cpu", card), engine_of(card, blocks=BLOCKS, block_tokens=BLOCK_TOKENS)[0]
    ours.warm_up()
    assert generate(ours, PROMPT, range(16), 20) == generate(host, PROMPT, range(16), 20)
    table = range(20, 30)
    difference = all_logprobs(ours, PROMPT, table, VOCAB) - all_logprobs(host, PROMPT, table, VOCAB)
    assert np.abs(difference).max() < TOLERANCE
