"""The thread that calls NIXL, after a bug has ended it."""

from __future__ import annotations

import pytest

from baton.core.errors import TransferError
from baton.move.transport.nixl_agent import NixlAgent

pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install -e '.[nixl]'")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback is printed, and no caller waits for ever."""
    agent = NixlAgent("a")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(agent._agent, "get_agent_metadata", fail)
    with pytest.raises(TransferError, match="a bug in Baton"):
        agent.metadata()
    with pytest.raises(TransferError, match="closed"):
        agent.metadata()
    agent.close()
