"""The forward pass of every supported model: one decoder, controlled by ModelConfig.

The tokens of all slices form one ragged batch [tokens, hidden] without padding. Attention writes KV to the arena's
blocks, and reads it from there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.step_engine import Progress
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.norm import rms_norm
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import Attention, AttentionPass
from baton.compute.torch.layers.collectives import Collectives, Ready, SingleRank
from baton.compute.torch.layers.experts import load_experts
from baton.compute.torch.layers.grouped import GroupedAttention
from baton.compute.torch.layers.latent import LatentAttention
from baton.compute.torch.layers.mlp import Mlp, load_mlp
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.layers.vocab import load_vocab_layers


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    input_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp
    mlp_sums: bool
    """Whether the ranks' results of `mlp` must be summed."""


class Decoder:
    """Computes the hidden states of a ragged batch, and the logits of some of its rows.

    In a parallel worker it is one rank's part of a model; `config` and `loader` then describe that part.
    """

    def __init__(self, config: ModelConfig, loader: TensorLoader, collectives: Collectives | None = None) -> None:
        self.config = config
        self.progress = Progress()
        """Counts the layers of this rank. On a GPU it counts launched layers, which may not be finished."""
        self._collectives = collectives or SingleRank()
        self._ops = loader.ops
        first_stage = self._collectives.place.first_stage
        self._vocab = load_vocab_layers(config, loader, self._collectives) if first_stage else None
        self.attention: Attention = _load_attention(config, loader, self._collectives)
        self._layers = [_load_layer(config, loader, self._collectives, layer) for layer in range(config.layers)]
        self._norm = loader.tensor("model.norm.weight")

    def forward(self, tokens: Tensor, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> Tensor:
        """Compute a batch and write its KV. tokens: [tokens]. Return hidden states [tokens, hidden]."""
        return self.compute(tokens, self.attention.begin(rows, kv, backend))

    def compute(self, tokens: Tensor, attention: AttentionPass) -> Tensor:
        """Compute a batch whose attention is planned. tokens: [tokens]. Return hidden states [tokens, hidden]."""
        return self.run_layers(self.embed(tokens), attention)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens [tokens]: [tokens, hidden]. Only on ranks of the first stage."""
        assert self._vocab is not None, "only the first stage has the embedding table"
        return self._vocab.embed(tokens)

    def run_layers(self, hidden: Tensor, attention: AttentionPass) -> Tensor:
        """Run hidden states [tokens, hidden] through the layers, and return them in the same shape."""
        return self.run_micro_batches([(hidden, attention)])[0]

    def run_micro_batches(self, batches: Sequence[tuple[Tensor, AttentionPass]]) -> list[Tensor]:
        """Run micro-batches, each as `run_layers`. While the ranks sum results of one, they compute the next.

        The order of sums is the same on every rank: layer by layer, each time one batch after the other.
        """
        runs = [self._run(hidden, attention) for hidden, attention in batches]
        finished: list[Tensor] = []
        while len(finished) < len(runs):
            for run in runs:
                try:
                    next(run)
                except StopIteration as end:
                    finished.append(end.value)
        return finished

    def _run(self, hidden: Tensor, attention: AttentionPass) -> Generator[None, None, Tensor]:
        """Run one micro-batch through the layers. Yields where a sum has begun."""
        ops, eps, ranks = self._ops, self.config.rms_eps, self._collectives
        begin = Ready if ranks.place.data else ranks.begin_sum
        added: Tensor | None = None  # the last MLP's result, which the next norm adds to the residual stream
        for index, layer in enumerate(self._layers):
            normal, hidden = ops.add_norm(hidden, added, layer.input_norm, eps)
            attended = begin(attention.attend(index, normal))
            self.progress.layers = index + 1
            yield
            normal, hidden = ops.add_norm(hidden, attended.wait(), layer.mlp_norm, eps)
            computed = layer.mlp(normal)
            summed = begin(computed) if layer.mlp_sums else Ready(computed)
            yield
            added = summed.wait()
        return hidden if added is None else hidden + added

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, which the output projection expects, to rows of hidden states [rows, hidden]."""
        return rms_norm(hidden, self._norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows of hidden states [rows, hidden]: [rows, vocab], float32."""
        assert self._vocab is not None, "only the first stage has the output projection"
        return self._vocab.project(self.final(hidden))


def _load_attention(config: ModelConfig, loader: TensorLoader, ranks: Collectives) -> Attention:
    if config.latent is not None:
        return LatentAttention(config, config.latent, loader, ranks)
    return GroupedAttention(config, loader)


def _load_layer(config: ModelConfig, loader: TensorLoader, ranks: Collectives, layer: int) -> _DecoderLayer:
    prefix, experts = f"model.layers.{layer}.", config.experts
    is_routed = experts is not None and layer in experts.layers
    return _DecoderLayer(
        input_norm=loader.tensor(f"{prefix}input_layernorm.weight"),
        mlp_norm=loader.tensor(f"{prefix}post_attention_layernorm.weight"),
        mlp=load_experts(config, experts, loader, prefix, ranks)
        if experts and is_routed
        else _load_mlp(config, loader, prefix),
        mlp_sums=not (experts and is_routed and ranks.place.sends_tokens(experts)),
    )


def _load_mlp(config: ModelConfig, loader: TensorLoader, prefix: str) -> Mlp:
    names = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down")]
    return load_mlp(loader, *names, biased=config.mlp_bias)
