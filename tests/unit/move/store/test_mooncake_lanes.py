"""The connections to the process of Mooncake's client, without Mooncake."""

from __future__ import annotations

import subprocess

import pytest

from baton.move.store import mooncake_store as module
from baton.move.store.mooncake_store import LANES, MooncakePlace, _ClientProcess


def test_a_lane_whose_call_has_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would take the late answer for that of its own call."""
    monkeypatch.setattr(module, "_start", lambda _: subprocess.Popen(["sleep", "600"]))
    monkeypatch.setattr(_ClientProcess, "_await_start", lambda _: None)
    client = _ClientProcess(MooncakePlace(host="127.0.0.1", port=1), 1 << 20)
    with client.lane():
        assert client._idle.qsize() == LANES - 1
    assert client._idle.qsize() == LANES
    with pytest.raises(TimeoutError), client.lane():
        raise TimeoutError
    assert client._idle.empty()
    assert client._process.poll() is not None
    client.kill()
