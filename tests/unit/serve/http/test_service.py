"""The service from start to end: what is started is ended, whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, SandboxConfig
from baton.core.errors import ModelError
from baton.core.http_config import HttpConfig
from baton.serve import model_fleet, service
from baton.serve.live.assembly import assemble


def _children() -> set[str]:
    while True:
        try:
            return {
                pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
            }
        except (FileNotFoundError, ProcessLookupError):
            pass  # a thread has ended meanwhile, and its children belong to another one: read all again


def _serve() -> int:
    config = Config(model="hash", http=HttpConfig(port=0))
    return asyncio.run(service.serve(config, [assemble(config, resolve_model("hash"))], tell=lambda _line: None))


def test_a_model_whose_template_cannot_be_read_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(card: ModelCard, limits: SandboxConfig) -> None:
        raise ModelError("the chat template cannot be read")

    monkeypatch.setattr(model_fleet, "load_chat_template", refuse)
    before = _children()
    with pytest.raises(ModelError, match="cannot be read"):
        _serve()
    assert _children() == before


def test_a_server_whose_http_ends_by_itself_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on computing for nobody."""

    async def fail(self: object, sockets: object) -> None:
        raise OSError("no more sockets")

    monkeypatch.setattr(service.HttpServer, "serve", fail)
    before = _children()
    assert _serve() == 1
    assert _children() == before
