"""Both ends of a model: the table that tokens are looked up in, and the projection to the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.torch.kernels.linear import Linear, make_linear
from baton.compute.torch.layers.loader import Loader
from baton.compute.torch.layers.ranks import Ranks


class Ends(Protocol):
    def embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens [tokens]: [tokens, hidden]."""
        ...

    def project(self, final: Tensor) -> Tensor:
        """Project normalized hidden states [rows, hidden] to the vocabulary: [rows, vocab], float32."""
        ...


@dataclass(frozen=True, slots=True)
class WholeEnds:
    table: Tensor  # [vocab, hidden]
    head: Linear

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Ends`."""
        return self.table[tokens]

    def project(self, final: Tensor) -> Tensor:
        """See `Ends`."""
        return self.head(final).float()


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """Each rank has a part of the vocabulary."""

    table: Tensor  # [tokens of the part, hidden]
    head: Linear
    part: range
    vocab_tokens: int
    ranks: Ranks

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Ends`. One rank knows a token, the others add zero, so the sum is exact."""
        places = tokens - self.part.start
        mine = (places >= 0) & (places < len(self.part))  # [tokens]
        found = self.table[places.where(mine, 0)].masked_fill(~mine[:, None], 0.0)
        return self.ranks.summed(found)

    def project(self, final: Tensor) -> Tensor:
        """See `Ends`. Ranks other than the first get no rows: they do not draw."""
        joined = self.ranks.joined(self.head(final).float())
        return final.new_empty(0, self.vocab_tokens) if joined is None else joined[:, : self.vocab_tokens]


def load_ends(config: ModelConfig, loader: Loader, ranks: Ranks) -> Ends:
    table = loader.tensor("model.embed_tokens.weight")
    # A packed head is a second copy of a tied table: a lookup needs rows, a fast product needs blocks.
    head = make_linear(table if config.tied_embeddings else loader.tensor("lm_head.weight"))
    if ranks.place.tensor == 1:
        return WholeEnds(table, head)
    return SharedEnds(table, head, ranks.place.vocab(config.vocab_tokens), config.vocab_tokens, ranks)
