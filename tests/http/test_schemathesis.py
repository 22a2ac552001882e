"""The server does what its OpenAPI document promises, for generated requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.seeds import Seeds
from tests.serving import serving

NEVER_TRIED = (
    "/cluster/events",  # it never ends
    # Their items have a `type` that decides which other fields they need, which the document does not express.
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def test_schemathesis_finds_nothing(tmp_path: Path, seeds: Seeds) -> None:
    """No 5xx; only documented statuses, types and bodies; what fits the document is served, the rest is refused.

    On a server of its own: it finds the workers' names, and flips their roles. A run that is not deep sends requests to
    every other path, and those of the next day to the rest.
    """
    with serving("hash") as server:
        with server.client() as client:
            paths = sorted(client.get("/openapi.json").raise_for_status().json()["paths"])
        excluded = () if seeds.deep else tuple(paths[seeds.day % 2 :: 2])
        found = run_schemathesis(server.url, tmp_path, random_examples=50 if seeds.deep else 0, excluded=excluded)
        assert found.returncode == 0, found.stdout + found.stderr
        with server.client() as client:
            assert client.get("/health").status_code == 200


def run_schemathesis(
    url: str, folder: Path, *, random_examples: int, excluded: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Send 1,300 requests that cover the document's limits, then so many random ones to each operation."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        *(f"--exclude-path={path}" for path in sorted({*NEVER_TRIED, *excluded})),
        "--checks=all",
        "--phases=examples,coverage,stateful" + (",fuzzing" if random_examples else ""),
        f"--max-examples={random_examples or 4}",
        "--request-timeout=120",
        "--max-response-time=120",
        "--generation-deterministic",
        "--warnings=off",
        "--no-color",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
