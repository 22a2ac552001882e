"""Mixture of experts: the router equals its definition, and tokens do not affect each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.compute.models.model_config import Experts
from baton.compute.torch.kernels.linear import DenseLinear
from baton.compute.torch.layers import experts as experts_module
from baton.compute.torch.layers.experts import ExpertMlp, HeldExperts, Router, SeparateExperts, StackedExperts
from baton.compute.torch.layers.mlp import GatedMlp
from tests.unit.compute.reference_kernels import TorchRowProduct

HIDDEN, COUNT = 16, 12
KINDS = {
    "plain": Experts(layers=(0,), count=COUNT, per_token=3, intermediate=8, normalized=False),
    "normalized": Experts(layers=(0,), count=COUNT, per_token=2, intermediate=8, normalized=True),
    "best_groups": Experts(
        layers=(0,), count=COUNT, per_token=3, intermediate=8, normalized=False, scale=4.0, groups=4, groups_used=2
    ),
    "biased_sigmoid": Experts(
        layers=(0,),
        count=COUNT,
        per_token=4,
        intermediate=8,
        scoring="sigmoid",
        normalized=True,
        scale=2.5,
        groups=3,
        groups_used=2,
        group_score="best_two",
        biased_choice=True,
    ),
}


def _router(experts: Experts) -> Router:
    torch.manual_seed(3)
    bias = torch.randn(COUNT) if experts.biased_choice else None
    return Router(torch.randn(COUNT, HIDDEN), bias, experts)


def _by_definition(router: Router, token: Tensor) -> dict[int, float]:
    """Return the chosen experts of one token and their weights, in plain Python."""
    experts = router.experts
    logits = [float(row @ token) for row in router.weight]
    exps = [float(torch.tensor(value).exp()) for value in logits]
    scores = [1 / (1 + 1 / value) if experts.scoring == "sigmoid" else value / sum(exps) for value in exps]
    bias = [0.0] * COUNT if router.choice_bias is None else router.choice_bias.tolist()
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size, summed = COUNT // experts.groups, 1 if experts.group_score == "best" else 2
    groups = [sum(sorted(choice[first : first + size])[-summed:]) for first in range(0, COUNT, size)]
    best = sorted(range(experts.groups), key=lambda group: -groups[group])[: experts.groups_used]
    allowed = [expert for expert in range(COUNT) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: experts.per_token]
    total = sum(scores[expert] for expert in chosen) if experts.normalized else 1.0
    return {expert: scores[expert] / total * experts.scale for expert in chosen}


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_chooses_by_its_definition(kind: str) -> None:
    router = _router(KINDS[kind])
    hidden = torch.randn(200, HIDDEN)
    chosen, weights = router.choose(hidden)
    for token, ids, values in zip(hidden, chosen.tolist(), weights.tolist(), strict=True):
        assert dict(zip(ids, values, strict=True)) == pytest.approx(_by_definition(router, token), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_experts_with_equal_scores_is_chosen(kind: str) -> None:
    """So every engine, on every device, chooses the same experts."""
    router = Router(torch.zeros(COUNT, HIDDEN), None, KINDS[kind])
    chosen, _ = router.choose(torch.randn(50, HIDDEN))
    assert chosen.tolist() == [list(range(KINDS[kind].per_token))] * 50


def test_a_token_does_not_depend_on_the_experts_of_other_tokens() -> None:
    """With 40 tokens that all choose one expert, with 40 random ones, and alone."""
    router = _router(KINDS["normalized"])
    experts = [_linear_mlp() for _ in range(COUNT)]
    mlp = ExpertMlp(router, SeparateExperts(experts), None)
    token = torch.randn(1, HIDDEN)
    alone = mlp(token)
    for others in (router.weight[:1].expand(40, -1), torch.randn(40, HIDDEN), token.expand(3, -1)):
        together = mlp(torch.cat((others, token)))[-1:]
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_every_token_is_the_weighted_sum_of_its_experts() -> None:
    router = _router(KINDS["plain"])
    experts = [_linear_mlp() for _ in range(COUNT)]
    hidden = torch.randn(30, HIDDEN)
    chosen, weights = router.choose(hidden)
    for token, ids, values, result in zip(
        hidden, chosen, weights, ExpertMlp(router, SeparateExperts(experts), None)(hidden), strict=True
    ):
        parts = [value * experts[int(expert)](token[None])[0] for expert, value in zip(ids, values, strict=True)]
        torch.testing.assert_close(result, torch.stack(parts).sum(0), atol=1e-5, rtol=1e-4)


def _linear_mlp() -> GatedMlp:
    return GatedMlp(DenseLinear(torch.randn(16, HIDDEN), None), DenseLinear(torch.randn(HIDDEN, 8), None))


def test_stacked_experts_equal_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row up to a number of tokens, expert by expert above."""
    torch.manual_seed(6)
    gate_up, down = torch.randn(COUNT, 16, HIDDEN), torch.randn(COUNT, HIDDEN, 8)
    separate = SeparateExperts([GatedMlp(DenseLinear(gate_up[one]), DenseLinear(down[one])) for one in range(COUNT)])
    stacked = StackedExperts(gate_up, down, TorchRowProduct())
    monkeypatch.setattr(experts_module, "STACKED_TOKENS_MAX", 10)
    for tokens in (1, 10, 11):
        hidden, chosen = torch.randn(tokens, HIDDEN), torch.randint(COUNT, (tokens, 3))
        torch.testing.assert_close(stacked(hidden, chosen), separate(hidden, chosen), atol=1e-4, rtol=1e-4)


def test_a_rank_without_an_expert_of_any_token_adds_nothing() -> None:
    bank = StackedExperts(torch.randn(4, 16, HIDDEN), torch.randn(4, HIDDEN, 8), TorchRowProduct())
    computed = HeldExperts(bank, range(4, 8))(torch.randn(2, HIDDEN), torch.tensor([[0, 3], [1, 2]]))
    assert torch.equal(computed, torch.zeros(2, 2, HIDDEN))
    assert bank(torch.empty(0, HIDDEN), torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, HIDDEN)
