"""What runs out on a machine, and what the server says about it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.serving import serving


def test_a_log_that_is_full_is_told_once_and_requests_go_on(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text("log_bytes_max = 2000\nlog_kept_bytes_max = 2000\n")
    log = tmp_path / "decisions.log"
    with serving("hash", "--config", str(config), "--log", str(log)) as server, server.client() as client:
        for index in range(5):
            client.post("/v1/completions", json={"prompt": f"request {index}"}).raise_for_status()
        assert server.stop() == 0
        told = [line for line in server.output().splitlines() if "decision log" in line]
    assert len(told) == 1
    assert f"{log} ends here: log_bytes_max is 2000" in told[0]
    assert log.stat().st_size <= 2000
    command = [sys.executable, "-m", "baton.cli.main", "replay", str(log)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_a_disk_that_is_full_from_the_start_is_told_before_anything_starts() -> None:
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--port", "0", "--log", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the decision log /dev/full" in done.stderr


def test_few_open_files_are_told_with_what_to_do() -> None:
    """The limit is raised where the system lets us; where it does not, connections beyond it are dropped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serve = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *serve], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2, "the port is taken"
    assert "may open 64 files" in done.stdout
    assert "ulimit -Hn" in done.stdout
