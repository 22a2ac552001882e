"""Linear layers in fp8: rounding, memory, refusals, and the text of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from baton.compute.attention_choice import attention_problem
from baton.compute.cost_estimates import weights_bytes
from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Precision
from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.place import rank_problems
from baton.compute.torch.kernels import fp8_linear
from baton.compute.torch.kernels.fp8_linear import (
    Fp8Linear,
    check_fp8,
    make_fp8_linear,
    multiply,
    multiply_on_device,
    quantize_rows,
)
from baton.compute.torch.kernels.linear import DenseLinear
from baton.core.errors import ModelError
from tests.unit.compute.models import TINY, VOCAB, all_logprobs, generate, tiny_llama, tiny_model

HALF_STEP = 2**-4
"""e4m3 has 3 bits behind the leading one: it rounds by at most half of the last, relative to the number."""
LEAST = 2**-10
"""Half of the smallest number of e4m3."""


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return resolve_model(str(folder))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=40))
def test_a_row_is_rounded_within_the_bounds_of_e4m3(numbers: list[float]) -> None:
    row = torch.tensor([numbers])
    codes, scales = quantize_rows(row)
    back = codes.float() * scales
    bound = row.abs() * HALF_STEP + scales * LEAST
    assert torch.all((back - row).abs() <= bound * 1.001)
    most = row.abs().argmax()
    torch.testing.assert_close(back[0, most], row[0, most], rtol=1e-6, atol=float(scales) * LEAST)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_sums_the_rounded_numbers_in_float32(biased: bool) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 64) * torch.logspace(-4, 4, 5)[:, None], torch.randn(160, 64)
    bias = torch.randn(160) if biased else None
    (a, a_scales), (w, w_scales) = quantize_rows(rows), quantize_rows(weight)
    exact = (a.double() * a_scales) @ (w.double() * w_scales).T
    exact = exact if bias is None else exact + bias
    torch.testing.assert_close(Fp8Linear(weight, bias)(rows), exact.float(), rtol=1e-5, atol=1e-4)


def test_the_device_form_has_the_arithmetic_of_the_cpu_form() -> None:
    """torch runs the call of a GPU on a CPU too: the same codes and scales, and a result in bfloat16."""
    torch.manual_seed(1)
    rows, weight = quantize_rows(torch.randn(3, 64)), quantize_rows(torch.randn(32, 64))
    scales = weight[1].T.contiguous()
    expected = multiply(*rows, weight[0], scales)
    found = multiply_on_device(*rows, weight[0], scales)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)


def test_bits_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(2)
    layer, rows = Fp8Linear(torch.randn(32, 64)), torch.randn(4, 64)
    rows[2] *= 1e6
    codes, scales = quantize_rows(rows)
    for index in range(4):
        alone = quantize_rows(rows[index : index + 1])
        assert torch.equal(alone[0].view(torch.uint8)[0], codes.view(torch.uint8)[index])
        assert torch.equal(alone[1][0], scales[index])
    assert torch.isfinite(layer(rows)).all()
    assert not layer(torch.zeros(1, 64)).any()


def test_a_shape_that_tensor_cores_do_not_take_stays_dense() -> None:
    weight = torch.randn(24, 64)
    assert not isinstance(make_fp8_linear(weight), Fp8Linear)
    torch.testing.assert_close(make_fp8_linear(weight)(torch.ones(1, 64)), DenseLinear(weight)(torch.ones(1, 64)))
    assert isinstance(make_fp8_linear(torch.randn(32, 64)), Fp8Linear)


def test_an_engine_computes_with_rounded_layers(card: ModelCard) -> None:
    """Log probabilities move a little from those of dense weights, and the cached and the recomputed text agree."""
    tokens, found = [3, 17, 60, 2, 44, 9, 8, 71], {}
    for weights in ("dense", "fp8"):
        layout = card.layout(block_tokens=4, dtype="float32")
        arena = bytearray(layout.block_bytes * 64)
        choice = choose_engine(card, layout, weights=weights, attention="sdpa")
        engine = load_engine(card, layout, memoryview(arena), dtype="float32", choice=choice)
        found[weights] = all_logprobs(engine, tokens, range(4), VOCAB)
    moved = np.abs(np.asarray(found["fp8"]) - np.asarray(found["dense"])).max()
    assert 0.0 < moved < 1.0
    assert generate(engine, tokens, range(8), 8) == generate(engine, tokens, range(8, 16), 8)


def test_auto_takes_the_torch_engine(card: ModelCard) -> None:
    layout = card.layout(block_tokens=4, dtype="bfloat16")
    chosen = choose_engine(card, layout, weights="fp8")
    assert (chosen.kind, chosen.weights, chosen.attention) == ("torch", "fp8", "sdpa")
    assert attention_problem(card, layout, "cpu", "auto", Precision("bfloat16", "fp8")) == ""
    with pytest.raises(ModelError, match=r"native cannot be used: weights are fp8.*use --attention-backend sdpa"):
        choose_engine(card, layout, weights="fp8", attention="native")


def test_experts_and_ranks_are_refused(tmp_path: Path, card: ModelCard) -> None:
    tiny_model(transformers.MixtralConfig(**TINY, num_local_experts=4)).save_pretrained(tmp_path)
    mixtral = resolve_model(str(tmp_path))
    layout = mixtral.layout(block_tokens=4, dtype="bfloat16")
    refusal = attention_problem(mixtral, layout, "cpu", "auto", Precision("bfloat16", "fp8"))
    assert "is for models without experts" in refusal
    with pytest.raises(ModelError, match="use --weights dense"):
        choose_engine(mixtral, layout, weights="fp8")
    pair = card.layout(block_tokens=4, dtype="bfloat16", tensor_parallel=2)
    assert "one rank" in rank_problems(card, pair, "fp8")[0]


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ModelError, match=r"capability 8\.9 or later, and cuda:0 has 8\.0; use --weights dense"):
        check_fp8(torch.device("cuda", 0))
    capability, tried = (9, 0), list[torch.device]()
    monkeypatch.setattr(fp8_linear, "try_product", tried.append)
    check_fp8(torch.device("cuda", 0))
    check_fp8(torch.device("cpu"))
    assert tried == [torch.device("cuda", 0)]


@pytest.mark.parametrize("error", [AttributeError("no _scaled_mm"), RuntimeError("only for sm_90\nmore")])
def test_a_torch_without_the_product_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*parts: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8_linear.try_product(torch.device("cpu"))
    monkeypatch.setattr(fp8_linear, "try_product", fail)
    with pytest.raises(ModelError, match=r"(no _scaled_mm|only for sm_90); use --weights dense"):
        check_fp8(torch.device("cuda", 0))


def test_memory_is_counted_as_it_is_held(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte and a scale per output for the layers' matrices; embeddings and norms stay in bfloat16."""
    held: list[int] = []
    whole = fp8_linear.Fp8Linear.__init__

    def counted(self: Fp8Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        whole(self, weight, bias)
        held.append(self._codes.nbytes + self._scales.nbytes)

    monkeypatch.setattr(fp8_linear.Fp8Linear, "__init__", counted)
    layout = card.layout(block_tokens=4, dtype="bfloat16")
    memory = memoryview(bytearray(layout.block_bytes))
    load_engine(card, layout, memory, dtype="bfloat16", choice=choose_engine(card, layout, weights="fp8"))
    embedded, norms = 2 * 96 * 32, 2 * 7 * 32
    assert weights_bytes(card, "bfloat16", "fp8") == sum(held) + embedded + norms
    assert weights_bytes(card, "bfloat16", "fp8") < weights_bytes(card, "bfloat16", "dense")
