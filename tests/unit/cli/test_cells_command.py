"""The arguments of `baton cells`: every problem at once, before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.config import Config

CELL = "http://127.0.0.1:8001"


def problems(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["cells", *flags]) == 2
    return [line.removeprefix("baton: ").strip() for line in capsys.readouterr().err.splitlines()]


def test_every_wrong_cell_is_named_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["127.0.0.1:8001", "http://h/v1", "http://h=0", "http://h=x", "http://h:99999"]
    found = problems(capsys, *wrong, CELL, f"{CELL}/=2", "--load-ratio", "0.5")
    assert [line.split(":")[0] for line in found[:5]] == [text.split(":")[0] for text in wrong]
    assert all("write http://HOST:PORT" in line for line in found[:5])
    assert found[5] == f"the cell {CELL} is given twice: leave one out"
    assert "load_ratio is 0.5" in found[6]


def test_an_address_of_a_network_needs_a_key_for_draining(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_ADMIN_KEY", raising=False)
    (found,) = problems(capsys, CELL, "--host", "0.0.0.0")
    assert "BATON_ADMIN_KEY" in found


@pytest.mark.parametrize(
    ("file", "flags", "address"),
    [
        ('[http]\nhost = "0.0.0.0"\nport = 8000\ninsecure = true\n', (), ("0.0.0.0", 8000)),
        ('[http]\nhost = "::1"\nport = 8000\n', ("--host", "127.0.0.2", "--port", "9000"), ("127.0.0.2", 9000)),
        ("[limits]\n", (), ("127.0.0.1", 8080)),
    ],
)
def test_a_flag_counts_before_the_file_and_the_file_before_the_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    flags: tuple[str, ...],
    address: tuple[str, int],
) -> None:
    monkeypatch.delenv("BATON_ADMIN_KEY", raising=False)
    served: list[tuple[str, int]] = []

    async def serve(config: Config, *_: object, **__: object) -> int:
        served.append((config.http.host, config.http.port))
        return 0

    monkeypatch.setattr("baton.cli.cells.serve_cells", serve)
    path = tmp_path / "cells.toml"
    path.write_text(file)
    assert main(["cells", CELL, "--config", str(path), *flags]) == 0
    assert served == [address]
