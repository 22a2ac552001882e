"""Four cells behind `baton cells`: one is killed, one ends, one hangs, and every stream has the text of one server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import NO_TLS, RunningServer, end, serving

pytestmark = pytest.mark.deep
CELLS = 4
COMPLETION: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 1}
BODIES = [
    *(("/v1/completions", {**COMPLETION, "prompt": f"prompt {number}", "seed": number}) for number in range(6)),
    *(
        ("/v1/chat/completions", {**COMPLETION, "messages": [{"role": "user", "content": f"{number}"}], "seed": number})
        for number in range(6)
    ),
]


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.text, self.errors, self.has_begun = "", list[dict[str, Any]](), threading.Event()
        self._asked = (url, path, {**body, "stream": True})

    def run(self) -> None:
        url, path, body = self._asked
        with (
            httpx.Client(base_url=url, timeout=200, verify=NO_TLS) as client,
            client.stream("POST", path, json=body) as lines,
        ):
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
        self.has_begun.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if len(self.text) > 100:
            self.has_begun.set()


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[list[RunningServer]]:
    config = tmp_path / "cell.toml"
    config.write_text('[survival]\ndrain_s = 0\n[http]\nproxies = ["127.0.0.1"]\n')
    with ExitStack() as opened:
        yield [opened.enter_context(serving("hash", "--mixed", "1", "--config", str(config))) for _ in range(CELLS)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "cells.log"


@pytest.fixture
def router(cells: list[RunningServer], log: Path) -> Iterator[str]:
    """The URL of a router that has found every cell ready."""
    urls = [server.url for server in cells]
    command = [sys.executable, "-m", "baton.cli.main", "cells", "--port", "0", "--log", str(log), *urls]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            url, ready = "", 0
            while ready < CELLS:
                line = process.stdout.readline()
                assert line, f"the router ended with {process.wait()}"
                url = line.split()[2] if line.startswith("listening on ") else url
                ready += line.endswith(" is ready\n")
            following = threading.Thread(target=process.stdout.read)
            following.start()
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            following.join()
        finally:
            end(process)


def test_the_loss_of_cells_costs_no_stream_and_changes_no_text(
    cells: list[RunningServer], router: str, log: Path
) -> None:
    readers = [Reader(router, path, body) for path, body in BODIES]
    for reader in readers:
        reader.start()
    for reader in readers:
        assert reader.has_begun.wait(120)
    with httpx.Client(base_url=router, timeout=60, verify=NO_TLS) as client:
        running = {cell["url"]: cell["running"] for cell in client.get("/cluster").json()["cells"]}
        killed, ended, hanging, last = sorted(cells, key=lambda server: running[server.url], reverse=True)
        hanging.process.send_signal(signal.SIGSTOP)
        ended.process.send_signal(signal.SIGTERM)
        killed.process.kill()
        for reader in readers:
            reader.join()
        lost = sum(running[server.url] for server in (killed, ended, hanging))
        assert lost > 0
        metrics = client.get("/metrics").text
        assert any(line.startswith("baton_cell_resumed_streams_total ") for line in metrics.splitlines())
    with last.client(timeout_s=200) as direct:
        for (path, body), reader in zip(BODIES, readers, strict=True):
            choice = direct.post(path, json=body).json()["choices"][0]
            expected = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (reader.errors, reader.text) == ([], expected)
    hanging.process.send_signal(signal.SIGCONT)
    replayed = subprocess.run([sys.executable, "-m", "baton.cli.main", "replay", str(log)], check=False)
    assert replayed.returncode == 0
