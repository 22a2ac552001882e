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
    """The number of ranks in a stage (tensor parallelism, or data parallelism)."""
    pipeline: int
    """The number of stages (pipeline parallelism)."""
    context: int = 1
    """The number of ranks that share the tokens of the same KV heads (context parallelism), one after the other."""
    experts: bool = False
    """Whether the ranks of a stage hold whole experts (expert parallelism)."""
    data: bool = False
    """Whether each rank of a stage has the whole attention, for requests of its own (data parallelism)."""

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

    @property
    def shard(self) -> int:
        """The number of the part of each block that the rank holds (`KVLayout.shards`)."""
        return self.stage if self.data else self.rank

    def part(self, items: int) -> range:
        """Return this rank's part of heads, or of the width of an MLP: all of them with data parallelism."""
        return range(items) if self.data else share(items, self.tensor, self.column)

    def held_experts(self, experts: Experts) -> range:
        """Return the routed experts whose weights this rank holds: some of them, or a part of the width of all."""
        return share(experts.count, self.tensor, self.column) if self.experts else range(experts.count)

    def sends_tokens(self, experts: Experts) -> bool:
        """Return whether each rank sends a part of the tokens to their experts, and gets the results back.

        Otherwise every rank computes its experts for all tokens, which it has, and the results are summed. Of n ranks,
        a sum moves 2 (n - 1) / n rows per token and rank. Sending moves 2 per_token / n of them there and back, and 1
        to gather the results. Ties prefer the sum, which has fewer messages. With data parallelism, each rank has only
        the tokens of its requests, and sends them.
        """
        return self.experts and (self.data or self.tensor > 2 * experts.per_token)

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
        tensor=layout.tensor_parallel * layout.data_parallel,
        pipeline=layout.pipeline_parallel,
        context=layout.context_parallel,
        experts=experts,
        data=layout.data_parallel > 1,
    )


def rank_shard(layout: KVLayout, place: RankPlace) -> Shard:
    """Return the rank's part of every block."""
    return layout.shards[place.shard]


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
        data_parallel=1,
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
        heads=len(place.part(config.heads)),
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
        found.append(f"KV in {layout.dtype} {alone}; use --kv-dtype bfloat16 or float32, or serve with one rank")
    if weights == "fp8":
        found.append("--weights fp8 is for workers of one rank; use --weights dense, or serve with one rank")
    elif weights != "dense":
        found.append(f"--weights {weights} {alone}; use --weights dense, or serve with one rank")
    if attention != "auto":
        found.append(f"--attention-backend {attention} is for workers of one rank; use auto, or serve with one rank")
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
    ranks = layout.tensor_parallel * layout.data_parallel
    experts = None if card.format == "hash" else read_config(card).experts
    if experts is None:
        return [f"{card.name} has no experts: leave out --enable-expert-parallel (parallel.experts)"]
    if ranks == 1:
        return ["--enable-expert-parallel divides experts among ranks, and there is 1: add --tp N or --dp N"]
    if experts.count % ranks:
        return [
            f"{experts.count} experts cannot be shared by {ranks} ranks: use --tp or --dp with a divisor of "
            f"{experts.count}, or leave out --enable-expert-parallel"
        ]
    return []


def data_problems(layout: KVLayout, device: str, *, experts: bool) -> list[str]:
    """Return the reasons why ranks cannot compute requests of their own. Empty if they can, or are not asked to.

    experts: the worker is expert parallel.
    """
    ranks, tensor = layout.data_parallel, layout.tensor_parallel
    if ranks == 1:
        return []
    found: list[str] = []
    if not experts:
        found.append(
            f"--dp {ranks} divides the experts of a model: add --enable-expert-parallel, or start {ranks} workers "
            f"instead, by --mixed {ranks} or --prefill N --decode N"
        )
    if tensor > 1:
        found.append(f"--dp {ranks} gives each rank the whole attention, and --tp {tensor} divides it: leave out one")
    if device != "cpu":
        found.append(
            f"--dp {ranks} needs an arena that all ranks read, and each GPU has its own: use --tp {ranks} "
            "--enable-expert-parallel, or --device cpu"
        )
    return found
