"""The actor of `baton ray up`: when its server fails, Ray must start it again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from baton.integrations.ray import server_actor
from baton.integrations.ray.server_actor import ServerActor

READY = "print('ready: here', flush=True); "
FAILS = "raise SystemExit(3)"
SERVES = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("program", "is_again", "is_stopped", "ends"),
    [
        (FAILS, False, False, False),
        (FAILS, True, False, True),
        (READY + FAILS, False, False, True),
        (READY + SERVES, True, True, False),
    ],
    ids=["first start fails", "restart fails", "a ready server fails", "stopped"],
)
def test_the_actor_ends_if_ray_has_to_start_its_server_again(
    monkeypatch: pytest.MonkeyPatch, program: str, *, is_again: bool, is_stopped: bool, ends: bool
) -> None:
    exits = list[int]()
    context = SimpleNamespace(was_current_actor_reconstructed=is_again)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(server_actor, "_RESTART_S", 0.01)
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(
        server_actor, "start_baton", lambda *_: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    )
    others = threading.enumerate()
    actor = ServerActor("", {})
    following = [thread for thread in threading.enumerate() if thread not in others]
    if is_stopped:
        assert actor.answer()[0]
        actor.stop()
    for thread in following:
        thread.join(60)
    assert actor._process.stdout is not None
    actor._process.stdout.close()
    actor._folder.cleanup()
    assert exits == ([1] if ends else [])
