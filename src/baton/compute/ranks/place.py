"""The part of a model that one rank of a parallel worker computes: a stage's layers, and a part of each layer.

Heads and the MLP's width are divided as in Megatron-LM (arXiv 1909.08053): the first product of a pair by outputs, the
second by inputs. So a layer needs two sums over ranks. No torch, because the server checks models for ranks too.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.model_config import Experts, ModelConfig
from baton.compute.models.open_model import read_config
from baton.decide.kv.layout import SCALED, KVLayout, Shard, share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The position of a rank: number `stage * tensor + column` of `tensor * pipeline` ranks."""

    rank: int
    tensor: int
    """The number of ranks in a stage (tensor parallelism)."""
    pipeline: int
    """The number of stages (pipeline parallelism)."""
    context: int = 1
    """The number of ranks that share the tokens of the same KV heads (context parallelism), one after the other."""
    experts: bool = False
    """Whether the ranks of a stage hold whole experts (expert parallelism)."""

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def column(self) -> int:
        """The rank's number in its stage."""
        return self.rank % self.tensor

    @property
    def first_stage(self) -> bool:
        """Whether the rank is in the first stage, which has the embedding and the output projection."""
        return self.stage == 0

    def part(self, items: int) -> range:
        """Return this rank's part of items that the ranks of a stage share."""
        return share(items, self.tensor, self.column)

    def held_experts(self, experts: Experts) -> range:
        """Return the routed experts whose weights this rank holds: some of them, or a part of the width of all."""
        return self.part(experts.count) if self.experts else range(experts.count)

    def sends_tokens(self, experts: Experts) -> bool:
        """Return whether each rank sends a part of the tokens to their experts, and gets the results back.

        Otherwise every rank computes its experts for all tokens, which it has, and the results are summed. Of n ranks,
        a sum moves 2 (n - 1) / n rows per token and rank. Sending moves 2 per_token / n of them there and back, and 1
        to gather the results. Ties prefer the sum, which has fewer messages.
        """
        return self.experts and self.tensor > 2 * experts.per_token

    def tokens(self, count: int) -> range:
        """Return this rank's part of a step's tokens. Every rank has ceil(count / tensor), the last ones fewer."""
        return self.vocab(count)

    def vocab(self, tokens: int) -> range:
        """Return this rank's rows of the vocabulary. Every rank has ceil(tokens / tensor) rows, the last ones fewer."""
        each = -(-tokens // self.tensor)
        return range(min(self.column * each, tokens), min((self.column + 1) * each, tokens))


def rank_place(layout: KVLayout, rank: int, *, experts: bool = False) -> RankPlace:
    """Return the position of a rank number. experts: the worker is expert parallel."""
    return RankPlace(
        rank=rank,
        tensor=layout.tensor_parallel,
        pipeline=layout.pipeline_parallel,
        context=layout.context_parallel,
        experts=experts,
    )


def rank_shard(layout: KVLayout, place: RankPlace) -> Shard:
    """Return the rank's part of every block."""
    return layout.shards[place.rank]


def rank_layout(layout: KVLayout, place: RankPlace) -> KVLayout:
    """Return the layout of the rank's part of a block, as the layout of a smaller model."""
    shard = rank_shard(layout, place)
    return msgspec.structs.replace(
        layout,
        layers=len(shard.layers),
        kv_heads=len(shard.heads),
        block_tokens=len(shard.tokens),
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
    )


def rank_config(config: ModelConfig, layout: KVLayout, place: RankPlace) -> ModelConfig:
    """Return the configuration of the rank's part, as that of a smaller model."""
    shard = rank_shard(layout, place)
    layers, experts = shard.layers, config.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            layers=tuple(layer - layers.start for layer in experts.layers if layer in layers),
            intermediate=experts.intermediate if place.experts else len(place.part(experts.intermediate)),
            shared_intermediate=(
                experts.shared_intermediate
                if place.sends_tokens(experts)
                else len(place.part(experts.shared_intermediate))
            ),
        )
    return msgspec.structs.replace(
        config,
        layers=len(layers),
        heads=config.heads // place.tensor,
        kv_heads=len(shard.heads),
        intermediate=len(place.part(config.intermediate)),
        windows=config.windows[layers.start : layers.stop],
        experts=experts,
    )


def rank_problems(card: ModelCard, layout: KVLayout, weights: str = "dense", attention: str = "auto") -> list[str]:
    """Return the reasons why the ranks of a layout cannot compute a model. Empty if they can.

    weights: see `Config.weights`. attention: see `Config.attention_backend`.
    """
    if layout.ranks == 1:
        return []
    found, ranks = layout.problems(), layout.tensor_parallel
    alone = f"needs the native engine, which computes whole models, and a worker has {layout.ranks} ranks"
    if layout.dtype in SCALED:
        found.append(f"KV in {layout.dtype} {alone}; use --kv-dtype bfloat16 or float32, or leave --tp and --pp at 1")
    if weights == "fp8":
        found.append("--weights fp8 is for workers of one rank; use --weights dense, or leave --tp and --pp at 1")
    elif weights != "dense":
        found.append(f"--weights {weights} {alone}; use --weights dense, or leave --tp and --pp at 1")
    if attention != "auto":
        found.append(
            f"--attention-backend {attention} is for workers of one rank; use auto, or leave --tp and --pp at 1"
        )
    return found if card.format == "hash" else found + _width_problems(read_config(card), ranks)


def _width_problems(config: ModelConfig, ranks: int) -> list[str]:
    found: list[str] = []
    if config.heads % ranks:
        found.append(f"{config.heads} query heads cannot be shared by {ranks} ranks; use a divisor of {config.heads}")
    widths = {"the MLP": config.intermediate}
    if config.experts is not None:
        widths["an expert"] = config.experts.intermediate
    found += [
        f"{name} is {width} wide, too narrow for {ranks} ranks; use at most {width}"
        for name, width in widths.items()
        if width < ranks
    ]
    return found


def expert_problems(card: ModelCard, layout: KVLayout) -> list[str]:
    """Return the reasons why the ranks of a layout cannot hold whole experts of a model. Empty if they can."""
    ranks, experts = layout.tensor_parallel, None if card.format == "hash" else read_config(card).experts
    if experts is None:
        return [f"{card.name} has no experts: leave out --enable-expert-parallel (parallel.experts)"]
    if ranks == 1:
        return ["--enable-expert-parallel divides experts among tensor ranks, and there is 1: add --tp N"]
    if experts.count % ranks:
        return [
            f"{experts.count} experts cannot be shared by {ranks} ranks: use --tp with a divisor of {experts.count}, "
            "or leave out --enable-expert-parallel"
        ]
    return []
