"""A tier whose store is ill is tried again, whatever its library says of the illness."""

from __future__ import annotations

from threading import Event
from typing import Any, cast

import pytest

from baton.core.errors import ConfigError, StoreError
from baton.core.keeping import TierNews, TierRests
from baton.serve.host import late_tiers
from baton.serve.host.late_tiers import LateTiers
from baton.serve.host.tier_opening import OpenTier, UnopenedTier

PATIENCE_S = 30.0


class _Rules:
    name, blocks_max = "far", 7


class _Store:
    """What opening it comes to, one after the other."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.name = "far"

    def open(self) -> OpenTier:
        end = self.ends.pop(0)
        if end is not None:
            raise end
        return cast("OpenTier", self)


@pytest.mark.parametrize("illness", [StoreError("down"), ConfigError("gone"), OSError("no route")])
def test_it_is_taken_up_when_it_can_be_opened(illness: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_tiers, "FIRST_PAUSE_S", 0.001)
    store, taken, told = _Store(illness, illness, None), Event(), list[TierNews]()
    found: list[tuple[Any, int]] = []

    def add(tier: OpenTier, blocks: int) -> None:
        found.append((tier, blocks))
        taken.set()

    unopened = UnopenedTier(rules=cast("Any", _Rules()), problem="down", open=store.open)
    monkeypatch.setattr(late_tiers, "PAUSE_S_MAX", 0.001)
    late = LateTiers([unopened], tell=told.append, add=add)
    late.begin()
    assert taken.wait(PATIENCE_S), "nobody tried again"
    late.close()
    assert told == [TierRests("far", rests=True)]
    assert found == [(store, 7)]
