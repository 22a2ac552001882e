"""A store's server that does not answer."""

from __future__ import annotations

import threading

import pytest

from baton.move.store.reachability import Reachability


def test_without_a_thread_that_asks_again_the_next_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody ever would: the store would be out of reach for the life of the process."""
    asked = threading.Event()
    reach = Reachability("there", asked.set, (OSError,))

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        reach.lost(OSError("gone"))
    assert reach.is_open
    reach.lost(OSError("gone"))
    assert asked.wait(30), "now there is a thread"
    reach.close()
    assert reach.counters.io_errors == 2
