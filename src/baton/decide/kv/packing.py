"""Packed blocks of a tier: some layers keep the arena's bytes, the others are rounded to a narrower type."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton.decide.kv.layout import KVDtype, KVLayout, cell_bytes, loss


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent cells of a block that are packed in the same way."""

    cells: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Packing:
    """A format for blocks outside of the arena. Packed blocks have the order of the arena's blocks."""

    layout: KVLayout
    dtype: KVDtype
    """Type of the layers that are not exact."""
    exact_layers: int = 0
    """Layers that keep the arena's bytes: half of them the first, half the last. An odd one is at the start."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of a block, in memory order."""
        layout, exact = self.layout, self._exact()
        runs: list[Run] = []
        for shard in layout.shards:
            cells = layout.planes * layout.rank_heads * layout.rank_tokens
            for layer in shard.layers:
                is_exact = layer in exact
                if runs and runs[-1].is_exact == is_exact:
                    runs[-1] = Run(runs[-1].cells + cells, is_exact)
                else:
                    runs.append(Run(cells, is_exact))
        return tuple(runs)

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block."""
        return sum(self.run_bytes(run) for run in self.runs)

    def run_bytes(self, run: Run) -> int:
        """Return the bytes of a packed run."""
        return run.cells * (self.layout.head_bytes if run.is_exact else cell_bytes(self.dtype, self.layout.head_dim))

    @property
    def loss(self) -> str:
        """Describe the rounding, for `timings` of a response. Empty: blocks come back unchanged."""
        rounded = loss(self.layout.dtype, self.dtype)
        if not rounded or len(self._exact()) == self.layout.layers:
            return ""
        spared = f"; {self.exact_layers} of {self.layout.layers} layers were spared" if self.exact_layers else ""
        return f"{rounded} in a tier{spared}"

    def problems(self) -> list[str]:
        """Return every reason why this layout cannot be packed."""
        ours = self.layout
        if loss(ours.dtype, self.dtype) is None:
            return [f"blocks hold {ours.dtype}, which has no conversion to {self.dtype}; leave the format out"]
        narrow, wide = (cell_bytes(dtype, ours.head_dim) for dtype in (self.dtype, ours.dtype))
        if narrow >= wide:
            return [f"it takes {narrow} bytes per head, and KV in {ours.dtype} takes {wide}; use a narrower one"]
        return msgspec.structs.replace(ours, dtype=self.dtype).problems()

    def _exact(self) -> set[int]:
        layers, count = self.layout.layers, min(self.exact_layers, self.layout.layers)
        first, last = count - count // 2, count // 2
        return {*range(first), *range(layers - last, layers)}
