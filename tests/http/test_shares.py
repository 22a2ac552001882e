"""What one client may use of what all share: room for files, batches and stored chats, and the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from msgspec import structs
from starlette.types import Receive, Scope, Send

from baton.core.errors import RequestError
from baton.core.http_config import BatchesConfig
from baton.core.limits import LimitsConfig
from baton.serve.http.batches.store import BatchStore, FileStore, Folder
from baton.serve.http.browser import BrowserRules
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import Edge
from baton.serve.http.identity import Keyring
from baton.serve.http.stored_responses import StoredResponses
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.http.test_batches import FOR_BATCHES, stored


def test_one_of_several_tenants_fills_only_half_of_the_folder(tmp_path: Path) -> None:
    """It left no room for the files of others, and its batches made theirs forgotten."""
    folder, mine, other = Folder(str(tmp_path)), "a\0tenant:a", "b\0tenant:b"
    files, batches = FileStore(folder, BatchesConfig(bytes_max=4000, files_max=4)), BatchStore(folder, batches_max=4)
    with pytest.raises(RequestError, match="this client keeps 0 files with 0 bytes, and may keep 2 with 2000"):
        files.add(mine, "a", b"x" * 2001, FOR_BATCHES)
    for name in "ab":
        files.add(mine, name, b"x", FOR_BATCHES)
    with pytest.raises(RequestError, match="this client keeps 2 files"):
        files.add(mine, "c", b"x", FOR_BATCHES)
    files.add(other, "a", b"x", FOR_BATCHES)
    batches.add(structs.replace(stored(0, "completed"), owner=other))
    for number in range(1, 9):
        batches.add(structs.replace(stored(number, "completed"), owner=mine))
    assert [len(batches.list(owner)) for owner in (mine, other)] == [2, 1]
    folder.close()


def test_a_client_with_many_stored_chats_ends_only_its_own() -> None:
    """The chats of all others were dropped first, since they were older."""
    stored = StoredResponses(kind="chat", responses_max=4, bytes_max=1000)
    for owner in ("a", "b"):
        stored.put(owner, "old", [], b"x" * 100)
    for number in range(9):
        stored.put("greedy", str(number), [], b"x")
    assert [len(stored.bodies(owner)) for owner in ("a", "b", "greedy")] == [1, 1, 2]
    stored.put("greedy", "large", [], b"x" * 900)
    assert [len(stored.bodies(owner)) for owner in ("a", "b", "greedy")] == [1, 1, 0]
    for owner in ("a", "b"):
        stored.delete(owner, "old")
    stored.put("greedy", "large", [], b"x" * 900)
    assert len(stored.bodies("greedy")) == 1


class Rounds:
    """An application that notes how many requests begin in one round of the event loop."""

    def __init__(self) -> None:
        self.begun = 0
        self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        self.most = max(self.most, self.begun)
        await asyncio.sleep(0)
        self.begun = 0
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def test_requests_without_a_body_begin_one_by_one() -> None:
    """300 requests for /metrics at once stopped all streams for 3.3 s."""
    app = Rounds()
    edge = Edge(app, Keyring(), BrowserRules(bound_host=""), Budgets(LimitsConfig()), Recorder(Metrics()), admin_port=0)

    async def play() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://localhost") as client:
            answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
        assert [answer.status_code for answer in answers] == [204] * 20

    asyncio.run(play())
    assert app.most <= 2  # the next one may begin before the first one's next round
