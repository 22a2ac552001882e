"""The cache of compiled C++: clear errors, and builds of different libraries do not wait for each other."""

from __future__ import annotations

import fcntl
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.move.compiling import NativeSources, NativeUnavailableError


@dataclass
class Place:
    """A library, a shell script as its compiler, and a cache folder."""

    library: NativeSources
    cache: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || : > "$(eval echo \\${$#})"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Place(NativeSources(name="one", folder=tmp_path, flags=(), units={"one": ()}), tmp_path / "cache")


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_is_told_what_to_set(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _homeless)
    with pytest.raises(NativeUnavailableError, match="set HOME or XDG_CACHE_HOME"):
        place.library.library_path()
    assert not place.library.has_to_be_built()


def test_a_place_that_cannot_hold_anything_is_told(place: Place) -> None:
    place.cache.write_text("a file")
    with pytest.raises(NativeUnavailableError, match="one cannot be stored among this user's caches"):
        place.library.library_path()


def test_a_compiler_that_cannot_be_run_is_told(place: Place) -> None:
    (place.cache.parent / "g++").write_bytes(b"\x7fELF no program")
    with pytest.raises(NativeUnavailableError, match="Exec format error"):
        place.library.library_path()


def test_what_was_built_needs_no_compiler_any_more(place: Place) -> None:
    """As in an image that is built with a compiler and runs without one."""
    built = place.library.library_path()
    (place.cache.parent / "g++").unlink()
    assert place.library.library_path() == built
    assert not place.library.has_to_be_built()
    assert place.library.can_be_built()
    built.unlink()
    assert not place.library.can_be_built()


def test_another_c_library_or_processor_has_a_library_of_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    built = place.library.library_path()
    monkeypatch.setattr(os, "confstr", lambda _name: "glibc 99.0")
    newer = place.library.library_path()
    assert newer not in (built, None)
    (place.cache.parent / "g++").unlink()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(NativeUnavailableError, match="on riscv64"):
        place.library.library_path()


def test_a_build_does_not_wait_for_that_of_another_library(place: Place) -> None:
    """Another process builds `one` for a long time."""
    built = place.library.library_path()
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = NativeSources(name="two", folder=place.cache.parent, flags=(), units={"two": ()})
        assert other.library_path().is_file()
