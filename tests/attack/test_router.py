"""A router of cells under attack: its streams go on, its memory returns, and its cell gets no request that harms it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.attack.conftest import (
    RunningServer,
    check_alive,
    check_memory,
    fill_allocator,
    memory_bytes,
    share_priority,
    warm_up,
)
from tests.attack.odd_bodies import TYPE, bodies, send_by_all
from tests.attack.test_large_bodies import check
from tests.attack.test_sockets import random_bytes
from tests.attack.watch import Watch
from tests.serving import POLL_S_MAX, POLLS_MAX, end

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def router(target: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A router with one cell."""
    command = [sys.executable, "-u", "-m", "baton.cli.main", "cells", "--port", "0", target.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    router = RunningServer(process, tmp_path_factory.mktemp("router") / "log")
    try:
        router.wait_listening()
        wait_for_cell(router)
        warm_up(router)
        fill_allocator(router)
        yield router
        assert router.stop() == 0
    finally:
        end(process)


def wait_for_cell(router: RunningServer) -> None:
    pause = threading.Event()
    with router.client() as client:
        for _ in range(POLLS_MAX):
            if client.get("/ready").status_code == 200:
                return
            pause.wait(POLL_S_MAX)
    raise AssertionError(router.output())


@contextmanager
def undisturbed(router: RunningServer, control: RunningServer) -> Iterator[None]:
    """During the block another client's streams go on. After it the router answers, and its memory is as it was."""
    check_alive(router)
    share_priority(router, control)
    before = memory_bytes(router.process.pid)
    with Watch(router, control) as watch:
        yield
    watch.check()
    check_memory(router, before, router.process.pid)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_large_odd_bodies_at_a_router(router: RunningServer, control: RunningServer, path: str) -> None:
    with undisturbed(router, control):
        for name, body in bodies(path):
            check(send_by_all(router.url + path, body.encode(), TYPE), name, {200, 400, 404, 413})


def test_random_bytes_at_a_router(router: RunningServer, control: RunningServer) -> None:
    with undisturbed(router, control):
        random_bytes(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), rounds=300)
