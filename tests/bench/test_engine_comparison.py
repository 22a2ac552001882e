"""`benchmarks/engines.py`: peers that are there in part are completed, and none outlives a comparison that fails."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[0]).with_suffix(".pid").write_text(str(os.getpid()))
for line in sys.stdin:
    print(json.dumps({"version": "1"}), flush=True)
"""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import engines

    return engines


@pytest.fixture
def comparison(engines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two peers of a few lines, of which the second has no model."""
    (tmp_path / "first.py").write_text(PEER)
    kinds = [engines.PeerKind(name, f"{name}.py", (), ("int8",)) for name in ("first", "second")]
    monkeypatch.setattr(engines, "PEERS", kinds)
    monkeypatch.setattr(engines, "HERE", tmp_path)
    where = {"work": str(tmp_path), "peers": str(tmp_path)}
    return argparse.Namespace(**where, only=[], threads=1, rounds=0, batch=[1], context=64, prompts=[])


def _fail_at(name: str, error: BaseException) -> Any:
    def model_of(engine: str, *_: object) -> Path:
        if engine == name:
            raise error
        return Path("model")

    return model_of


def test_an_export_that_fails_leaves_out_its_peer_alone(
    engines: ModuleType, comparison: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "model_of", _fail_at("second", subprocess.CalledProcessError(3, ["exporter"])))
    first, second = engines.compare("int8", None, comparison)
    assert (first.version, first.failed) == ("1", "")
    assert second.failed == "its exporter ended with code 3; its words are in second-int8.log"


def test_whatever_ends_the_comparison_ends_the_peers(
    engines: ModuleType, comparison: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first is stopped between its turns, and would be so for good."""
    monkeypatch.setattr(engines, "model_of", _fail_at("second", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engines.compare("int8", None, comparison)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "first.pid").read_text()), 0)


def test_an_environment_without_its_package_is_not_there(engines: ModuleType, tmp_path: Path) -> None:
    """As where pip was interrupted, or could not build it."""
    python = tmp_path / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for packages, found in (("pytest[extra]",), True), (("pytest", "a-package-of-nobody"), False):
        kind = engines.PeerKind("peer", "peer.py", packages, ())
        python.unlink(missing_ok=True)
        assert engines.missing(kind, tmp_path)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        assert (engines.missing(kind, tmp_path) == "") is found
