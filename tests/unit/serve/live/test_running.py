"""An operator finds the choices of a request by its id, however odd the id is."""

from __future__ import annotations

import re
from typing import cast

import pytest

from baton.core.types import RequestId
from baton.serve.live.live_request import LiveRequest
from baton.serve.live.running import find_live


def test_an_id_finds_itself_or_all_choices_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's id is compiled to no pattern: one of 1 MB took 2 s, in which no stream went on."""
    monkeypatch.setattr(re, "compile", None)
    names = ["a-0-0", "a-0-1", "a", "ab-0-0", "a-b-0-0", "a.-0-0"]
    live = {RequestId(name): cast("LiveRequest", name) for name in names}
    found = {asked: find_live(live, asked) for asked in ("a", "a-0-1", "a.", "", ".", "b", "a" * 1_000_000)}
    assert found == {"a": ["a-0-0", "a-0-1", "a"], "a-0-1": ["a-0-1"], "a.": ["a.-0-0"]} | {
        asked: [] for asked in ("", ".", "b", "a" * 1_000_000)
    }
