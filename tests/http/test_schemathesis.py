"""What the OpenAPI document promises is what the server does, for requests that nobody thought of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BLOCKS = 64
"""A context of 1,024 tokens: room for every conversation that is made up, but no endless answers."""


def test_schemathesis_finds_nothing(build: Callable, serve: Callable, tmp_path: Path) -> None:
    """No 5xx; only documented statuses, types and bodies; what fits the document is served, the rest is refused."""
    client = serve(build(blocks=BLOCKS))
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{client.base_url}/openapi.json",
        "--checks=all",
        "--phases=examples,coverage,fuzzing,stateful",
        "--max-examples=20",
        "--generation-deterministic",
        "--warnings=off",
        "--no-color",
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert client.get("/health").status_code == 200
