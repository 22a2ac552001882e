"""What the OpenAPI document promises is what the server does, for requests that nobody thought of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.serving import RunningServer


def test_schemathesis_finds_nothing(hash_server: RunningServer, tmp_path: Path) -> None:
    """No 5xx; only documented statuses, types and bodies; what fits the document is served, the rest is refused."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{hash_server.url}/openapi.json",
        "--checks=all",
        "--phases=examples,coverage,fuzzing,stateful",
        "--max-examples=20",
        "--generation-deterministic",
        "--warnings=off",
        "--no-color",
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    with hash_server.client() as client:
        assert client.get("/health").status_code == 200
