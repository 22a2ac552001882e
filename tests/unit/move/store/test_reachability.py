"""A store whose server does not answer."""

from __future__ import annotations

import threading

import pytest

from baton.move.store.reachability import Reachability


def test_without_a_thread_that_asks_again_the_next_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no thread would probe the server, and the store would stay unreachable for ever."""
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
