"""The sizes of decode steps on a GPU, for the kernels and for a host's memory budget. No torch: hosts have none."""

from __future__ import annotations

import math

from baton.compute.models.card import ModelCard
from baton.compute.models.open_model import read_config
from baton.decide.kv.layout import KVLayout

SPLIT_TOKENS = 512
"""Keys per split of a decode step's attention. It does not depend on the batch, so neither does the order of sums."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes of captured graphs. A smaller batch is padded with requests of length 0."""
WIDTH_TOKENS_MIN = 1024
WIDTH_FACTOR = 4
"""Factor between the context lengths of captured graphs: 1,024 tokens, 4,096, 16,384, up to the model's context."""
_FLOAT_BYTES = 4
_WORKSPACES = 2
"""Workspaces per rank: captured graphs, and steps without a graph, allocate from different pools of torch."""


def batch_bucket(requests: int) -> int | None:
    """Return the batch size of the smallest graph that fits this many requests. None: no graph does."""
    return next((bucket for bucket in BATCH_BUCKETS if bucket >= requests), None)


def width_bucket(tokens: int, context_tokens: int) -> int:
    """Return the context length of the smallest graph that fits this many tokens."""
    width = WIDTH_TOKENS_MIN
    while width < tokens:
        width *= WIDTH_FACTOR
    return max(tokens, min(width, context_tokens))


def splits_shape(requests: int, heads: int, keys: int) -> tuple[int, int, int]:
    """Return the shape [requests, heads, splits] of a decode step's partial results, for `keys` keys per request."""
    return requests, heads, -(-keys // SPLIT_TOKENS)


def workspace_bytes(card: ModelCard, layout: KVLayout, requests_max: int) -> int:
    """Return the device memory that one rank needs for the partial results of its largest decode step.

    They are float32: a sum of values and a log-sum-exp for each request, query head and split.
    """
    if card.format == "hash":
        return 0
    config = read_config(card)
    dim = config.head_dim if config.latent is None else config.latent.kv_rank
    heads = -(-config.heads // layout.tensor_parallel)
    keys = width_bucket(card.context_tokens, card.context_tokens) + layout.block_tokens
    results = math.prod(splits_shape(batch_bucket(requests_max) or requests_max, heads, keys))
    return _WORKSPACES * results * (dim + 1) * _FLOAT_BYTES
