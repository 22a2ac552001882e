"""A mixture of experts: a router picks a few small MLPs for each token.

Every expert computes the tokens that chose it as one matrix; a token's results are summed in the order of its own
choice. So nothing about a token depends on what the others chose, except how many rows a product has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.linear import Linear
from baton.engine.model_config import Experts, ModelConfig
from baton.engine.models.loader import Loader
from baton.engine.models.mlp import GatedMlp, load_mlp
from baton.engine.tensor_names import expert_names

WEIGHT_SUM_MIN = 1e-20
"""Added to a sum of weights before dividing by it. Source: DeepSeek-V3's published model code."""


@dataclass(frozen=True, slots=True)
class Router:
    """Scores in float32, whatever the model computes in: a rounded tie would send a token elsewhere."""

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
        chosen = self._in_best_groups(choice).topk(self.experts.used, -1).indices
        weights = scores.gather(-1, chosen)
        if self.experts.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_MIN)
        return chosen, weights * self.experts.scale

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """Rule out every expert whose group is not among a token's best."""
        if self.experts.groups == self.experts.groups_used:
            return choice
        grouped = choice.view(len(choice), self.experts.groups, -1)  # [tokens, groups, experts of a group]
        summed = 1 if self.experts.group_score == "best" else 2
        best = grouped.topk(summed, -1).values.sum(-1).topk(self.experts.groups_used, -1).indices
        ruled_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, value=False)
        return grouped.masked_fill(ruled_out[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The MLP that every token passes. `gate`: what its output is scaled by (Qwen2-MoE)."""

    mlp: GatedMlp
    gate: Linear | None  # to 1

    def __call__(self, hidden: Tensor) -> Tensor:
        out = self.mlp(hidden)
        return out if self.gate is None else out * self.gate(hidden).sigmoid()


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """See `Mlp`."""

    router: Router
    experts: Sequence[GatedMlp]
    shared: SharedExpert | None

    def __call__(self, hidden: Tensor) -> Tensor:
        chosen, weights = self.router.choose(hidden)
        order = chosen.flatten().argsort(stable=True)  # [tokens * used] places in `chosen`, by expert
        gathered = hidden[order // chosen.shape[1]]
        computed = torch.empty_like(gathered)
        first = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                computed[order[first : first + count]] = self.experts[expert](gathered[first : first + count])
            first += count
        routed = (computed.view(*chosen.shape, -1).float() * weights[..., None]).sum(1).to(hidden.dtype)
        return routed if self.shared is None else routed + self.shared(hidden)


def load_experts(config: ModelConfig, experts: Experts, loader: Loader, prefix: str) -> ExpertMlp:
    """prefix: `model.layers.N.`."""
    names = expert_names(config.architecture)
    shared = f"{prefix}{names.shared}."
    bias = loader.exact(prefix + names.choice_bias) if experts.biased_choice else None
    router = Router(loader.exact(f"{prefix}{names.router}.weight"), bias, experts)
    mlps = [load_mlp(loader, *(prefix + part for part in names.expert(index))) for index in range(experts.count)]
    if not experts.shared_intermediate:
        return ExpertMlp(router, mlps, None)
    mlp = load_mlp(loader, f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj")
    gate = loader.linear(prefix + names.shared_gate) if experts.shared_gate else None
    return ExpertMlp(router, mlps, SharedExpert(mlp, gate))
