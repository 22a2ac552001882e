"""A disk that fails under a running server: requests go on with the same text, and the log says what ended."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machine_faults import BrokenDisk
from tests.process.test_hosts import ask, text_of
from tests.process.test_tiers import BLOCKS, complete, wait_stored
from tests.serving import RunningServer, all_workers_ready, serving

pytestmark = pytest.mark.deep
OTHERS = [f"Prompt {number} takes the place of another one in the arena. " * 20 for number in range(4)]
FAULTS = {
    "I/O error": (BrokenDisk.fail, "Input/output error"),
    "read-only": (BrokenDisk.become_read_only, "Read-only file system"),
    "full": (BrokenDisk.fill, "No space left on device"),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[BrokenDisk]:
    made = BrokenDisk(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_under_a_server_costs_no_request(fault: str, disk: BrokenDisk, tmp_path: Path) -> None:
    """The KV tier, the decision log and the step logs are on it. A worker that is killed comes back without its log."""
    fail, reason = FAULTS[fault]
    arguments = _arguments(disk.folder, tmp_path)
    with serving(*arguments) as server:
        text, _ = complete(server)
        wait_stored(server, BLOCKS)
        texts = [complete(server, other)[0] for other in OTHERS]
        wait_stored(server, 4 * BLOCKS)
        fail(disk)
        assert complete(server)[0] == text
        assert [complete(server, other)[0] for other in OTHERS] == texts
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_until(all_workers_ready, reason="the worker is back")
        assert complete(server)[0] == text
        ask_until(lambda: f"ends here: {reason}" in server.output(), lambda: complete(server))
        if fault != "full":  # otherwise the slots of the tier were allocated before
            told, news = f"{reason}; it continues with the slots it has", itertools.count()
            ask_until(lambda: told in server.output(), lambda: complete(server, f"New prompt {next(news)}. " * 40))
        assert "Traceback" not in server.output()
        assert server.stop() == 0
    if fault != "full":
        command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", "0", *arguments]
        again = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (again.returncode, reason in again.stderr, "Traceback" in again.stderr) == (2, True, False), again.stderr


def test_a_model_that_cannot_be_read_again_costs_the_worker_that_needs_it(
    tiny_model: str, disk: BrokenDisk, tiny_server: RunningServer
) -> None:
    """A worker is killed on a machine whose disk has failed. It cannot load the model, and the other one serves on."""
    body = {"prompt": "a b c", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with tiny_server.client() as client:
        expected = text_of(ask(client, body))
    model = shutil.copytree(tiny_model, disk.folder / "model")
    with serving(str(model), "--dtype", "float32", "--mixed", "2") as server, server.client() as client:
        disk.fail()
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_until(lambda _: "mixed-0 died 2 times" in server.output(), reason="the worker is given up")
        assert "cannot read" in server.output()
        assert text_of(ask(client, body)) == expected
        assert server.stop() == 0


def _arguments(disk: Path, folder: Path) -> tuple[str, ...]:
    config = folder / "baton.toml"
    config.write_text(f'step_log = "{disk}/steps"\n')
    tier = f"file://{disk}/kv?bytes=8e6"
    return (
        "hash",
        "--mixed",
        "1",
        "--kv-blocks",
        "96",
        "--config",
        str(config),
        "--tier",
        tier,
        "--log",
        f"{disk}/log",
    )


def ask_until(condition: Callable[[], bool], ask: Callable[[], object]) -> None:
    """Send requests until the condition holds. A file whose last block has room takes some more bytes."""
    for _ in range(100):
        if condition():
            return
        ask()
    assert condition()
