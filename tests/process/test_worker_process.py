"""One worker process as the server holds it: whatever it prints and however it starts, its end is noticed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.serving import serving

PLUGIN = '''
import os
import sys
from pathlib import Path

from baton.decide.policy.batching import MixedChunked


class DiesTalking:
    """Prints a line that never ends and dies; once."""

    def select(self, candidates, limits, cost):
        died = Path(__file__).with_name("died")
        if candidates and not died.exists():
            died.touch()
            sys.stdout.write("x" * 300_000)
            sys.stdout.flush()
            os._exit(3)
        return MixedChunked().select(candidates, limits, cost)
'''


LEAVES_A_CHILD = '''
import os
import subprocess
from pathlib import Path

from baton.decide.policy.batching import MixedChunked


class LeavesAChild:
    """Dies once, and leaves a child that holds its output open."""

    def select(self, candidates, limits, cost):
        child = Path(__file__).with_name("child")
        if candidates and not child.exists():
            child.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            os._exit(3)
        return MixedChunked().select(candidates, limits, cost)
'''


def test_a_worker_that_leaves_a_child_behind_is_started_again_and_its_request_goes_on(tmp_path: Path) -> None:
    """The child holds the output open, whose end used to be waited for as long as it lived."""
    (tmp_path / "parent.py").write_text(LEAVES_A_CHILD)
    config = tmp_path / "baton.toml"
    config.write_text("[policy.batching]\nuse = 'parent:LeavesAChild'\n")
    with serving("hash", "--config", str(config), environment={"PYTHONPATH": str(tmp_path)}) as server:
        try:
            with server.client() as client:
                body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body).raise_for_status().json()
            assert answer["timings"]["attempts"] == 2
            assert server.stop() == 0, server.output()
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_worker_that_dies_in_a_long_line_is_started_again_and_its_request_goes_on(tmp_path: Path) -> None:
    """A line of more than 64 KiB used to end the task that keeps the worker: its requests waited for ever."""
    (tmp_path / "talker.py").write_text(PLUGIN)
    config = tmp_path / "baton.toml"
    config.write_text("[policy.batching]\nuse = 'talker:DiesTalking'\n")
    with serving("hash", "--config", str(config), environment={"PYTHONPATH": str(tmp_path)}) as server:
        with server.client() as client:
            body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["timings"]["attempts"] == 2
        server.wait_output("x" * 4096)
        assert server.stop() == 0, server.output()
