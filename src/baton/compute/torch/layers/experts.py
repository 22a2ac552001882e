"""A mixture of experts: a router chooses a few small MLPs for each token.

Every expert computes its tokens as one matrix. A token's results are summed in the order in which the router chose its
experts. So other tokens influence only the number of rows of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.models.model_config import Experts, ModelConfig
from baton.compute.models.tensor_names import expert_names
from baton.compute.torch.kernels.expert_rows import RowProduct
from baton.compute.torch.kernels.layer_ops import TORCH_OPS, LayerOps
from baton.compute.torch.kernels.linear import DenseLinear, Linear
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.mlp import GatedMlp, Mlp, load_mlp
from baton.compute.torch.layers.tensor_loader import TensorLoader

STACKED_TOKENS_MAX = 128
"""Maximum tokens that are computed row by row. Every row then reads its expert's weights anew."""
WEIGHT_SUM_MIN = 1e-20
"""Added to a sum of weights before dividing by it. Source: DeepSeek-V3's published model code."""


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts for tokens. Scores are float32, because rounding could create ties and change the choice."""

    weight: Tensor  # [experts, hidden]
    choice_bias: Tensor | None  # [experts]
    experts: Experts

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, both [tokens, used].

        Sources: Mixtral (arXiv 2401.04088), DeepSeek-V2 (2405.04434, device-limited), DeepSeek-V3 (2412.19437, 2.1.2).
        """
        logits = functional.linear(hidden.float(), self.weight)  # [tokens, experts]
        scores = logits.sigmoid() if self.experts.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        chosen = _best(self._in_best_groups(choice), self.experts.per_token)
        weights = scores.gather(-1, chosen)
        if self.experts.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_MIN)
        return chosen, weights * self.experts.scale

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """Set the scores [tokens, experts] of experts outside of a token's best groups to -inf."""
        if self.experts.groups == self.experts.groups_used:
            return choice
        grouped = choice.unflatten(1, (self.experts.groups, -1))  # [tokens, groups, experts of a group]
        summed = 1 if self.experts.group_score == "best" else 2
        best = _best(grouped.topk(summed, -1).values.sum(-1), self.experts.groups_used)
        ruled_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, value=False)
        return grouped.masked_fill(ruled_out[..., None], float("-inf")).flatten(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores, in descending order.

    Of equal scores the lower index comes first, which `topk` does not guarantee.
    """
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The MLP that computes every token. The sigmoid of `gate` scales its output (Qwen2-MoE)."""

    mlp: GatedMlp
    gate: Linear | None  # to 1

    def __call__(self, hidden: Tensor) -> Tensor:
        out = self.mlp(hidden)
        return out if self.gate is None else out * self.gate(hidden).sigmoid()


class ExpertBank(Protocol):
    """The small MLPs of one layer."""

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Compute tokens [tokens, hidden] with their experts [tokens, used]: [tokens, used, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Implements `ExpertBank` expert by expert. The host counts the tokens of each, so it waits for the device."""

    experts: Sequence[GatedMlp]

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # [tokens * used] indices into `chosen`, sorted by expert
        gathered = hidden[order // chosen.shape[1]]
        computed = torch.empty_like(gathered)
        first = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                computed[order[first : first + count]] = self.experts[expert](gathered[first : first + count])
            first += count
        return computed.view(*chosen.shape, hidden.shape[1])


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Implements `ExpertBank`: few tokens row by row without waiting for the device, many tokens expert by expert."""

    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]
    product: RowProduct
    ops: LayerOps = TORCH_OPS

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        if not len(hidden):  # no token of this step has an expert of this rank
            return hidden.new_empty(*chosen.shape, hidden.shape[1])
        if len(hidden) > STACKED_TOKENS_MAX:
            parts = zip(self.gate_up, self.down, strict=True)
            mlps = [GatedMlp(DenseLinear(one), DenseLinear(two), self.ops) for one, two in parts]
            return SeparateExperts(mlps)(hidden, chosen)
        experts = chosen.flatten()
        gated = self.ops.gate(self.product(hidden, self.gate_up, experts))  # [tokens * used, intermediate]
        return self.product(gated, self.down, experts).view(*chosen.shape, hidden.shape[1])


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """Implements `ExpertBank` on a rank that holds some experts: the results of the others are zero."""

    bank: ExpertBank
    held: range

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        tokens, places = ((chosen >= self.held.start) & (chosen < self.held.stop)).nonzero(as_tuple=True)
        computed = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        local = chosen[tokens, places] - self.held.start
        computed[tokens, places] = self.bank(hidden[tokens], local[:, None])[:, 0]
        return computed


@dataclass(frozen=True, slots=True)
class SentExperts:
    """Implements `ExpertBank` on a rank that holds some experts: sends each token to the ranks of its experts.

    Each rank calls it with tokens of its own. Source: GShard (arXiv 2006.16668), all-to-all dispatch and combine.
    """

    bank: ExpertBank
    each: int
    """Experts per rank."""
    ranks: Collectives

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        count = self.ranks.place.tensor
        order = chosen.flatten().argsort(stable=True)  # by expert, so by the rank that holds it
        wanted = chosen.flatten().bincount(minlength=count * self.each)
        asked = self.ranks.exchange(wanted, [self.each] * count, [self.each] * count).view(count, -1)
        sent, received = wanted.view(count, -1).sum(1).tolist(), asked.sum(1).tolist()
        arrived = self.ranks.exchange(hidden[order // chosen.shape[1]], sent, received)
        experts = torch.arange(self.each, device=hidden.device).repeat(count).repeat_interleave(asked.flatten())
        results = self.ranks.exchange(self.bank(arrived, experts[:, None])[:, 0], received, sent)
        computed = torch.empty_like(results)
        computed[order] = results
        return computed.view(*chosen.shape, hidden.shape[1])


@dataclass(frozen=True, slots=True)
class DividedTokens:
    """Implements `Mlp`: each rank of a stage computes a part of the tokens, and gathers the results of the others."""

    mlp: Mlp
    ranks: Collectives

    def __call__(self, hidden: Tensor) -> Tensor:
        place = self.ranks.place
        mine, each = place.tokens(len(hidden)), -(-len(hidden) // place.tensor)
        computed = hidden.new_zeros(each, hidden.shape[1])
        computed[: len(mine)] = self.mlp(hidden[mine.start : mine.stop])
        return self.ranks.all_gather(computed)[: len(hidden)]


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Implements `Mlp` with a mixture of experts."""

    router: Router
    experts: ExpertBank
    shared: SharedExpert | None

    def __call__(self, hidden: Tensor) -> Tensor:
        chosen, weights = self.router.choose(hidden)
        computed = self.experts(hidden, chosen)  # [tokens, used, hidden]
        routed = (computed.float() * weights[..., None]).sum(1).to(hidden.dtype)
        return routed if self.shared is None else routed + self.shared(hidden)


def load_experts(config: ModelConfig, experts: Experts, loader: TensorLoader, prefix: str, ranks: Collectives) -> Mlp:
    """Load this rank's part of the mixture of experts of one layer. prefix: `model.layers.N.`."""
    names = expert_names(config.architecture)
    shared = f"{prefix}{names.shared}."
    bias = loader.float32(prefix + names.choice_bias) if experts.biased_choice else None
    router = Router(loader.float32(f"{prefix}{names.router}.weight"), bias, experts)
    held = ranks.place.held_experts(experts)
    parts = [tuple(prefix + part for part in names.expert(index)) for index in held]
    bank = _load_bank(loader, parts)
    sends = ranks.place.sends_tokens(experts)
    if len(held) < experts.count:
        bank = SentExperts(bank, len(held), ranks) if sends else HeldExperts(bank, held)
    always: SharedExpert | None = None
    if experts.shared_intermediate:
        mlp = load_mlp(loader, f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj")
        gate = loader.linear(prefix + names.shared_gate) if experts.shared_gate else None
        always = SharedExpert(mlp, gate)
    whole = ExpertMlp(router, bank, always)
    return DividedTokens(whole, ranks) if sends and not ranks.place.data else whole


def _load_bank(loader: TensorLoader, parts: Sequence[tuple[str, str, str]]) -> ExpertBank:
    """Load all experts. parts: the names of each expert's gate, up and down projections."""
    if loader.row_product is None:
        return SeparateExperts([load_mlp(loader, gate, up, down) for gate, up, down in parts])
    gate_up = [loader.stacked(f"{gate}.weight", f"{up}.weight") for gate, up, _ in parts]
    down = [loader.tensor(f"{down}.weight") for _, _, down in parts]
    return StackedExperts(torch.stack(gate_up), torch.stack(down), loader.row_product, loader.ops)
