"""`benchmarks/native_parts.py`: the four steps that it times differ by what they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_step_leaves_one_part_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from native_parts import steps

    (first, second), *others = (steps(2)[kind] for kind in ("whole", "unsampled", "shared", "alone"))
    assert [first.sample, second.sample] == [True, True]
    assert not any(part.sample for parts in others for part in parts)
    unsampled, shared, alone = others
    assert not set(unsampled[0].block_table) & set(unsampled[1].block_table)
    assert shared[0].block_table[:-1] == shared[1].block_table[:-1]
    assert shared[0].start == first.start
    assert [part.start for part in alone] == [0, 0]
