"""Rotary positions on torch: the angles of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.models.rope import inverse_frequencies


class Rotary:
    """Computes cosines and sines for the positions of a step. A table for a long context would be slower."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        half = torch.from_numpy(inverse_frequencies(config))
        self._frequencies = torch.cat((half, half)).to(device)  # [rotary_dim]
        self._signs = torch.cat((-torch.ones_like(half), torch.ones_like(half))).to(device)
        self._factor = config.rope.attention_factor
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of positions [tokens], each [tokens, 1, rotary_dim].

        The sine is negated in the first half, as `rotate` needs it.
        """
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos() * self._factor, angles.sin() * (self._signs * self._factor)
        return cos.to(self._dtype), sin.to(self._dtype)
