"""Run the bare native library with random models and random steps: `native_fuzz LIBRARY SEEDS`.

It runs as a module in a separate process, because the library may be built with sanitizers. No torch.

Every instruction set must give the results of PLAIN, and the same bits as for a request alone, in one chunk and on one
thread. No byte of the arena may change outside of the new tokens' slots.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.compute.native.library import (
    NativeLatentSizes,
    NativeLibrary,
    NativeModel,
    NativeStep,
)
from baton.core.errors import ModelError
from baton.move.weights_file import WeightsFile, create_weights_file
from tests.unit.compute.native_models import DENSE, FLOAT32, Shape, Weights
from tests.unit.compute.native_refusals import computes_what_is_read, refuses_what_is_not_there

KEY = "library and form"
Part = tuple[list[int], int, list[int]]
"""The tokens of a slice, the position of the first, and the block table."""


@dataclass
class Given:
    """The arrays of a step."""

    tokens: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    block_counts: np.ndarray
    angles: np.ndarray
    """[positions, rotary_dim]."""

    @staticmethod
    def of(slices: list[Part], rotary_dim: int) -> Given:
        positions = max(start + len(tokens) for tokens, start, _ in slices)
        angles = np.arange(positions)[:, None] / 7.0 ** np.linspace(0, 1, rotary_dim // 2)
        return Given(
            tokens=_int32([token for tokens, _, _ in slices for token in tokens]),
            counts=_int32([len(tokens) for tokens, _, _ in slices]),
            starts=_int32([start for _, start, _ in slices]),
            blocks=_int32([block for _, _, table in slices for block in table]),
            block_counts=_int32([len(table) for _, _, table in slices]),
            angles=np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32),
        )

    def step(self, layers_done: np.ndarray) -> NativeStep:
        """Return pointers to the arrays, which must outlive the result."""
        arrays = (self.tokens, self.counts, self.starts, self.blocks, self.block_counts, self.angles, layers_done)
        lengths = (len(self.counts), len(self.tokens), len(self.blocks), len(self.angles))
        return NativeStep(*lengths, *(array.ctypes.data for array in arrays))


class Engine:
    """One handle of the library over its own arena."""

    def __init__(
        self,
        library: NativeLibrary,
        weights: Weights,
        blocks: int,
        threads: int,
        *,
        cores: list[int] | None = None,
        file: WeightsFile | None = None,
    ) -> None:
        """file: the first engine packs its weights into it, the others take them from there."""
        s = weights.shape
        self.shape, self.library = s, library
        self.layers_done = np.zeros(1, dtype=np.int32)
        model = NativeModel(
            layers=len(s.windows),
            hidden=s.hidden,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            vocab=s.vocab,
            rms_eps=1e-5,
            dtype=s.number,
            kv_dtype=s.kv_number,
            block_tokens=s.block_tokens,
            threads=threads,
            kernels=library.kernels.encode(),
            cores=None if cores is None else (ctypes.c_int32 * threads)(*cores),
            latent=s.latent or NativeLatentSizes(),
        )
        self.blocks = blocks
        self.handle = library.new(model)
        try:
            self._set(weights, file)
        except ModelError:
            library.free(self.handle)
            raise
        rows = blocks * s.planes * s.block_tokens
        self.arena = np.full((rows, s.token_bytes), 0xFF, dtype=np.uint8)  # NaN in every number
        library.set_arena(self.handle, self.arena.ctypes.data, blocks)

    def _set(self, weights: Weights, file: WeightsFile | None) -> None:
        target = self.library.weights(self.handle)
        if file is not None and file.is_complete:
            target.attach(file.descriptor, KEY)
            return
        if file is not None:
            target.share(file.descriptor, KEY)
        for index, layer in enumerate(weights.layers):
            target.set_layer(index, layer)
            for mlp in weights.mlps:
                target.add_mlp(index, mlp)
        for index, latent in enumerate(weights.latents):
            target.set_latent(index, latent)
        for index, router in enumerate(weights.routers):
            target.set_router(index, router)
        target.finish_weights(weights.final_norm, weights.head, weights.embedding)

    def step(self, slices: list[Part]) -> np.ndarray:
        """Compute (tokens, start, block table) of each slice, and return the logits of every token: [rows, vocab]."""
        return self.compute(Given.of(slices, self.shape.rotary_dim))

    def compute(self, given: Given) -> np.ndarray:
        """Compute a step that may be invalid. Raises ModelError."""
        self.library.forward(self.handle, given.step(self.layers_done))
        return self.project(range(len(given.tokens)))

    def project(self, rows: Sequence[int]) -> np.ndarray:
        """Return the logits of rows of the last step: [rows, vocab]. Raises ModelError."""
        wanted, logits = _int32(rows), np.empty((len(rows), self.shape.vocab), dtype=np.float32)
        self.library.project(self.handle, wanted.ctypes.data, len(rows), logits.ctypes.data)
        return logits

    def read(self, rows: Sequence[int]) -> np.ndarray:
        """Return rows of the last step after the final norm: [rows, hidden]. Raises ModelError."""
        wanted, hidden = _int32(rows), np.empty((len(rows), self.shape.hidden), dtype=np.float32)
        self.library.read(self.handle, wanted.ctypes.data, len(rows), hidden.ctypes.data)
        return hidden

    def slots(self, tokens: int, start: int, table: list[int]) -> Iterator[int]:
        """List the rows of the arena that a slice writes."""
        for position in range(start, start + tokens):
            block, slot = table[position // self.shape.block_tokens], position % self.shape.block_tokens
            for plane in range(self.shape.planes):
                yield (block * self.shape.planes + plane) * self.shape.block_tokens + slot


def play(path: Path, kernels: list[str], seed: int) -> None:
    """Compare random steps of one random model on every instruction set with PLAIN, and with a copy of the arena."""
    rng = random.Random(seed)
    s = Shape.draw(rng)
    if seed % 3 == 0:  # often enough that a router leaves experts out
        s.number, s.kv_number, s.form = FLOAT32, FLOAT32, DENSE
        s.experts, s.used = rng.choice(((5, 2), (7, 1), (40, 6)))
        s.draw_groups(rng)
    if seed % 4 == 0:
        s.draw_latent(rng)
    weights = Weights(s, np.random.default_rng(seed))
    lengths = [rng.choice((1, 2, 5, 33, 66, 300)) for _ in range(rng.randint(1, 4))]
    counts = [-(-length // s.block_tokens) for length in lengths]
    blocks = sum(counts) + 2
    free = rng.sample(range(blocks), blocks)
    requests = [
        ([rng.randrange(s.vocab) for _ in range(n)], [free.pop() for _ in range(c)])
        for n, c in zip(lengths, counts, strict=True)
    ]
    engines = [
        Engine(NativeLibrary(path, name), weights, blocks, rng.choice((1, 2, 3))) for name in (*kernels, "PLAIN")
    ]
    done = [0] * len(requests)
    alone = rng.randrange(len(requests))
    seen: list[list[np.ndarray]] = [[] for _ in engines]
    while waiting := [index for index, (tokens, _) in enumerate(requests) if done[index] < len(tokens)]:
        slices, chosen = [], []
        for index in rng.sample(waiting, rng.randint(1, len(waiting))):
            tokens, table = requests[index]
            end = done[index] + rng.randint(1, len(tokens) - done[index])
            slices.append((tokens[done[index] : end], done[index], table[: -(-end // s.block_tokens)]))
            done[index] = end
            chosen.append(index)
        before = [engine.arena.copy() for engine in engines]
        results = [engine.step(slices) for engine in engines]
        if alone in chosen:
            first = sum(len(tokens) for tokens, _, _ in slices[: chosen.index(alone)])
            rows = slice(first, first + len(slices[chosen.index(alone)][0]))
            for bits, result in zip(seen, results, strict=True):
                bits.append(result[rows])
        written = [row for tokens, start, table in slices for row in engines[0].slots(len(tokens), start, table)]
        for engine, result, old in zip(engines, results, before, strict=True):
            changed = (engine.arena != old).any(axis=1).nonzero()[0]
            assert set(changed) <= set(written), (
                f"{engine.library.kernels} wrote outside of its slots, seed {seed}: {s}"
            )
            error = np.abs(result - results[-1]).max()
            assert error < s.tolerance, f"{engine.library.kernels} {error} seed {seed}: {s}"
    for engine, bits in zip(engines, seen, strict=True):
        judge_company(engine, weights, requests[alone], np.concatenate(bits), f"seed {seed}: {s}")
    parts = [(tokens[1:], 1, table) for tokens, table in requests if len(tokens) > 1] or [([0], 0, requests[0][1])]
    refuses_what_is_not_there(engines[0], Given.of(parts, s.rotary_dim))
    for engine in engines:
        computes_what_is_read(engine, Given.of(parts, s.rotary_dim))
        engine.library.free(engine.handle)


def judge_company(
    engine: Engine, weights: Weights, request: tuple[list[int], list[int]], seen: np.ndarray, what: str
) -> None:
    """Check that logits and KV of a request in a batch have the bits of the request alone on one thread.

    The lonely engine maps weights that another one has packed.
    """
    tokens, table = request
    file = make_weights_file()
    engine.library.free(Engine(engine.library, weights, 1, 1, file=file).handle)
    alone = Engine(engine.library, weights, len(table), 1, file=file)
    os.close(file.descriptor)
    expected = alone.step([(tokens, 0, list(range(len(table))))])
    assert (seen.view(np.int32) == expected.view(np.int32)).all(), f"{engine.library.kernels} other logits, {what}"
    slots = (
        list(each.slots(len(tokens), 0, blocks)) for each, blocks in ((engine, table), (alone, [*range(len(table))]))
    )
    mine, theirs = (each.arena[rows] for each, rows in zip((engine, alone), slots, strict=True))
    assert (mine == theirs).all(), f"{engine.library.kernels} other KV, {what}"
    alone.library.free(alone.handle)


def make_weights_file() -> WeightsFile:
    descriptor = create_weights_file()
    assert descriptor is not None, "this system has no memory files"
    return WeightsFile(descriptor)


def _int32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def main() -> None:
    path, seeds = Path(sys.argv[1]), int(sys.argv[2])
    assert ctypes.sizeof(NativeStep) == 80
    kernels = NativeLibrary(path).usable_kernels()[:-1]
    for seed in range(seeds):
        play(path, kernels, seed)
    print(f"{seeds} models on {' '.join(kernels)}")


if __name__ == "__main__":
    main()
