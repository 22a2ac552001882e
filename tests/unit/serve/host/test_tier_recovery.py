"""A tier whose store could not be opened is tried again, whatever error its library raises."""

from __future__ import annotations

from threading import Event
from typing import Any, cast

import pytest

from baton.core.errors import ConfigError, StoreError
from baton.core.tier_messages import StoreEvent, TierRests
from baton.move.backoff import Backoff
from baton.serve.host import tier_recovery
from baton.serve.host.tier_opening import OpenTier, UnopenedTier
from baton.serve.host.tier_recovery import TierReopener

WAIT_S = 30.0


class _Rules:
    name, blocks_max = "far", 7


class _Store:
    """A store whose opening ends as given, one attempt after the other."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.name = "far"

    def open(self) -> OpenTier:
        end = self.ends.pop(0)
        if end is not None:
            raise end
        return cast("OpenTier", self)


@pytest.mark.parametrize("failure", [StoreError("down"), ConfigError("gone"), OSError("no route")])
def test_a_tier_is_added_when_its_store_can_be_opened(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_recovery, "BACKOFF", Backoff(0.001, 0.001))
    store, taken, told = _Store(failure, failure, None), Event(), list[StoreEvent]()
    found: list[tuple[Any, int]] = []

    def add(tier: OpenTier, blocks: int) -> None:
        found.append((tier, blocks))
        taken.set()

    unopened = UnopenedTier(rules=cast("Any", _Rules()), problem="down", open=store.open)
    reopener = TierReopener([unopened], tell=told.append, add=add)
    reopener.begin()
    assert taken.wait(WAIT_S), "it was not tried again"
    reopener.close()
    assert told == [TierRests("far", rests=True)]
    assert found == [(store, 7)]
