"""The layers that depend on the vocabulary: the embedding table, and the output projection (LM head)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.torch.kernels.linear import Linear, make_linear
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.tensor_loader import TensorLoader


class VocabLayers(Protocol):
    """Embedding table and output projection of a model."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens [tokens]: [tokens, hidden]."""
        ...

    def project(self, final: Tensor) -> Tensor:
        """Project normalized hidden states [rows, hidden] to logits: [rows, vocab], float32."""
        ...


@dataclass(frozen=True, slots=True)
class LocalVocabLayers:
    """Implements `VocabLayers` with the whole vocabulary on one rank."""

    table: Tensor  # [vocab, hidden]
    head: Linear

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def project(self, final: Tensor) -> Tensor:
        return self.head(final).float()


@dataclass(frozen=True, slots=True)
class ParallelVocabLayers:
    """Implements `VocabLayers` with a part of the vocabulary on each rank. Source: Megatron-LM (arXiv 1909.08053)."""

    table: Tensor  # [tokens of the part, hidden]
    head: Linear
    part: range
    vocab_tokens: int
    collectives: Collectives

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens. One rank holds a token and the others add zero, so the sum is exact."""
        places = tokens - self.part.start
        held = (places >= 0) & (places < len(self.part))  # [tokens]
        found = self.table[places.where(held, 0)].masked_fill(~held[:, None], 0.0)
        return self.collectives.begin_sum(found).wait()

    def project(self, final: Tensor) -> Tensor:
        """Project to logits on the first rank; the other ranks, which do not sample, return no rows."""
        gathered = self.collectives.gather(self.head(final).float())
        return final.new_empty(0, self.vocab_tokens) if gathered is None else gathered[:, : self.vocab_tokens]


def load_vocab_layers(config: ModelConfig, loader: TensorLoader, collectives: Collectives) -> VocabLayers:
    """Load the embedding table and the output projection."""
    table = loader.tensor("model.embed_tokens.weight")
    # A packed head is a second copy of a tied table: a lookup needs rows, a fast product needs oneDNN's blocks.
    head = make_linear(table if config.tied_embeddings else loader.tensor("lm_head.weight"))
    place = collectives.place
    if place.tensor == 1:
        return LocalVocabLayers(table, head)
    return ParallelVocabLayers(table, head, place.vocab(config.vocab_tokens), config.vocab_tokens, collectives)
