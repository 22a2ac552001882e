"""Random models of odd sizes for the bare native library, and its input structures."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from baton.compute.native.library import (
    NativeLatent,
    NativeLatentSizes,
    NativeLayer,
    NativeMatrix,
    NativeMlp,
    NativeRouter,
)

FLOAT32, BFLOAT16 = 0, 1
DENSE, INT8, Q8, Q4, Q4M = 0, 2, 3, 4, 5  # forms of weights
KV_INT8, KV_E4M3 = 6, 7
TOLERANCE = {FLOAT32: 2e-4, BFLOAT16: 0.15}
"""The largest difference of a logit, which is about 1. Only the orders of sums and roundings differ."""
COARSE_TOLERANCE = 1.0
"""With 8-bit rounding, a difference of the last bit may change a code."""


@dataclass
class Shape:
    """The sizes of a random model."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    windows: list[int]
    number: int
    kv_number: int
    block_tokens: int
    form: int
    biased: bool
    normed: bool
    steep: float
    """Factor on gates: many are far outside of the range of the exponential."""
    experts: int = 0
    used: int = 0
    shared: bool = False
    gated: bool = False
    groups: int = 1
    groups_used: int = 1
    sigmoid: bool = False
    latent: NativeLatentSizes | None = None

    @staticmethod
    def draw(rng: random.Random) -> Shape:
        kv_heads = rng.choice((1, 2, 3))
        shape = Shape(
            heads=kv_heads * rng.choice((1, 2, 3, 7)),
            kv_heads=kv_heads,
            head_dim=rng.choice((2, 8, 24, 32, 64, 80, 256)),
            hidden=rng.choice((4, 31, 32, 48, 100)),
            intermediate=rng.choice((1, 16, 40, 72)),
            vocab=rng.choice((5, 32, 97)),
            windows=[rng.choice((0, 0, 3, 70)) for _ in range(2)],
            number=rng.choice((FLOAT32, BFLOAT16)),
            kv_number=rng.choice((FLOAT32, BFLOAT16, KV_INT8, KV_E4M3)),
            form=rng.choice((DENSE, DENSE, DENSE, INT8, Q8, Q4, Q4M)),
            block_tokens=rng.choice((1, 3, 16, 128)),
            biased=rng.random() < 0.3,
            normed=rng.random() < 0.3,
            steep=rng.choice((1.0, 1.0, 300.0)),
        )
        shape.draw_experts(rng)
        return shape

    def draw_experts(self, rng: random.Random) -> None:
        """With coarse rounding, a token uses all experts, so that instruction sets choose the same ones."""
        self.experts = rng.choice((0, 1, 5, 40))
        self.used = rng.randint(1, min(self.experts, 8)) if self.experts else 0
        if self.tolerance > TOLERANCE[FLOAT32]:
            self.experts = self.used
        self.shared, self.gated = rng.random() < 0.5, rng.random() < 0.5
        self.draw_groups(rng)

    def draw_groups(self, rng: random.Random) -> None:
        """Choose like DeepSeek's routers: groups first; by sigmoid with a bias, or by softmax."""
        self.sigmoid = rng.random() < 0.5
        self.groups = rng.choice([count for count in (1, 2, 4, 5) if self.experts % count == 0])
        needed = -(-self.used * self.groups // max(1, self.experts))
        self.groups_used = rng.randint(max(1, needed), self.groups)

    def draw_latent(self, rng: random.Random) -> None:
        """Latent attention: one vector per token for all heads, and no window."""
        self.latent = NativeLatentSizes(
            q_rank=rng.choice((0, 5, 32, 70)),
            kv_rank=rng.choice((2, 24, 64, 90)),
            rope_dim=rng.choice((2, 8, 64)),
            nope_dim=rng.choice((1, 12, 32, 100)),
            value_dim=rng.choice((1, 10, 64)),
            score_scale=0.2,
        )
        self.kv_heads, self.heads = 1, rng.choice((1, 3, 16))
        self.head_dim, self.windows = self.latent.kv_rank + self.latent.rope_dim, [0, 0]

    @property
    def planes(self) -> int:
        """The bytes of all layers in a block."""
        return len(self.windows) * (2 if self.latent is None else 1)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attended(self) -> tuple[int, int]:
        """The outputs of qkv, and the inputs of the output projection."""
        width, cached = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is None:
            return width + 2 * cached, width
        queries = self.heads * (self.latent.nope_dim + self.latent.rope_dim)
        return (self.latent.q_rank or queries) + cached, self.heads * self.latent.value_dim

    @property
    def token_bytes(self) -> int:
        scaled = self.head_dim + 4  # a byte each, and the scale
        return self.kv_heads * {FLOAT32: self.head_dim * 4, BFLOAT16: self.head_dim * 2}.get(self.kv_number, scaled)

    @property
    def tolerance(self) -> float:
        coarse = self.form != DENSE or self.kv_number in (KV_INT8, KV_E4M3)
        return COARSE_TOLERANCE if coarse else TOLERANCE[max(self.number, self.kv_number)]


@dataclass
class Weights:
    """The arrays of one model, and the structures that point to them."""

    shape: Shape
    rng: np.random.Generator
    alive: list[np.ndarray] = field(default_factory=list)
    layers: list[NativeLayer] = field(default_factory=list)
    latents: list[NativeLatent] = field(default_factory=list)
    mlps: list[NativeMlp] = field(default_factory=list)
    routers: list[NativeRouter] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        made, taken = s.attended
        for window in s.windows:
            self.layers.append(
                NativeLayer(
                    input_norm=self.vector(s.hidden),
                    mlp_norm=self.vector(s.hidden),
                    q_norm=self.vector(s.head_dim) if s.normed else None,
                    k_norm=self.vector(s.head_dim) if s.normed else None,
                    qkv=self.matrix(made, s.hidden),
                    o=self.matrix(s.hidden, taken),
                    window=window,
                )
            )
            if s.latent is not None:
                self.latents.append(self.latent(s.latent))
            if s.experts:
                scores = s.experts + (s.shared and s.gated)
                self.routers.append(self.router(scores, normalized=bool(self.routers)))
        for _ in range(max(1, s.experts)):
            self.mlps.append(self.mlp(s.intermediate))
        if s.experts and s.shared:
            self.mlps.append(self.mlp(2 * s.intermediate + 1))
        self.final_norm = self.vector(s.hidden)
        self.head = self.matrix(s.vocab, s.hidden, biased=False)
        self.embedding = self.matrix(s.vocab, s.hidden, biased=False) if s.biased else None

    def latent(self, sizes: NativeLatentSizes) -> NativeLatent:
        heads, narrow = self.shape.heads, sizes.q_rank
        found = NativeLatent(
            q_norm=self.vector(narrow) if narrow else None,
            kv_norm=self.vector(sizes.kv_rank),
            keys=self.dense(heads * sizes.kv_rank, sizes.nope_dim, biased=False),
            values=self.dense(heads * sizes.value_dim, sizes.kv_rank, biased=False),
        )
        if narrow:
            found.queries = self.matrix(heads * (sizes.nope_dim + sizes.rope_dim), narrow, biased=False)
        return found

    def router(self, scores: int, *, normalized: bool) -> NativeRouter:
        rows = self.rng.standard_normal((scores, self.shape.hidden)).astype(np.float32)
        matrix = NativeMatrix(data=self.hold(rows), rows=scores, inputs=self.shape.hidden)
        s = self.shape
        return NativeRouter(
            scores=matrix,
            experts=s.experts,
            used=s.used,
            normalized=normalized,
            sigmoid=s.sigmoid,
            groups=s.groups,
            groups_used=s.groups_used,
            group_best=2 if s.sigmoid and s.experts >= 2 * s.groups else 1,
            scale=1.5,
            choice_bias=self.vector(s.experts) if s.sigmoid else None,
        )

    def mlp(self, width: int) -> NativeMlp:
        hidden = self.shape.hidden
        return NativeMlp(self.matrix(2 * width, hidden, gates=width), self.matrix(hidden, width))

    def vector(self, count: int) -> int:
        return self.hold(self.rng.uniform(0.5, 1.5, count).astype(np.float32))

    def matrix(self, rows: int, inputs: int, *, biased: bool | None = None, gates: int = 0) -> NativeMatrix:
        """Make a random matrix. gates: the number of first rows with large values."""
        if self.shape.form != DENSE:
            return self.quantized(rows, -(-inputs // 32) * 32, biased=biased, gates=gates)
        return self.dense(rows, inputs, biased=biased, gates=gates)

    def dense(self, rows: int, inputs: int, *, biased: bool | None = None, gates: int = 0) -> NativeMatrix:
        values = (self.rng.standard_normal((rows, inputs)) / np.sqrt(inputs)).astype(np.float32)
        values[:gates] *= self.shape.steep
        if self.shape.number == BFLOAT16:
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        bias = self.vector(rows) if (self.shape.biased if biased is None else biased) else None
        return NativeMatrix(data=self.hold(values), bias=bias, rows=rows, inputs=inputs)

    def quantized(self, rows: int, inputs: int, *, biased: bool | None, gates: int) -> NativeMatrix:
        """Make random codes, with scales that give weights of the size of dense ones."""
        form, bits = self.shape.form, 4 if self.shape.form in (Q4, Q4M) else 8
        codes = self.rng.integers(0, 1 << bits, (rows, inputs), dtype=np.uint8)
        size = 3.0 / np.sqrt(inputs) / (1 << bits)
        per_row = self.rng.uniform(0.5 * size, size, rows).astype(np.float32)
        per_run = self.rng.uniform(0.5 * size, size, (rows, inputs // 32)).astype(np.float16)
        per_row[:gates] *= np.float32(self.shape.steep)
        per_run[:gates] *= np.float16(self.shape.steep)
        minimums = self.hold((per_run * np.float16(-8)).astype(np.float16)) if form == Q4M else None
        bias = self.vector(rows) if (self.shape.biased if biased is None else biased) else None
        scales = self.hold(per_row if form == INT8 else per_run)
        return NativeMatrix(
            data=self.hold(codes), bias=bias, rows=rows, inputs=inputs, dtype=form, scales=scales, minimums=minimums
        )

    def hold(self, values: np.ndarray) -> int:
        self.alive.append(values)
        return values.ctypes.data
