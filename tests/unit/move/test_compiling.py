"""The cache of compiled C++: clear errors, and builds of different libraries do not wait for each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.move.compiling import NativeSources, NativeUnavailableError


@dataclass
class Place:
    """A library, a shell script as its compiler, a cache folder, and a folder of temporary files."""

    library: NativeSources
    cache: Path
    temporary: Path

    def replacement(self) -> Path:
        """Return the folder that is used if the cache folder cannot be."""
        return self.temporary / f"baton-{os.geteuid()}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || : > "$(eval echo \\${$#})"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    library = NativeSources(name="one", folder=tmp_path, flags=(), units={"one": ()})
    return Place(library, tmp_path / "cache", temporary)


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_gets_a_private_temporary_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _homeless)
    built = place.library.library_path()
    assert built.parent == place.replacement()
    assert not place.library.has_to_be_built()


def test_a_home_that_is_read_only_gets_a_private_temporary_folder(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is built once: the next process finds it there. A file in place of the folder refuses root, too."""
    place.cache.write_text("a file")
    built = place.library.library_path()
    assert built.parent == place.replacement()
    assert f"one is not kept in {place.cache / 'baton'}" in caplog.text
    assert not place.library.has_to_be_built()
    assert place.library.library_path() == built


def test_the_cache_folder_is_private(place: Place) -> None:
    """Also one that an earlier version made with the permissions of other folders."""
    (place.cache / "baton").mkdir(parents=True, mode=0o755)
    built = place.library.library_path()
    assert built.parent == place.cache / "baton"
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_libraries_in_a_folder_that_others_can_write_to_are_not_loaded(
    mode: int, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    planted = place.library.library_path()
    planted.parent.chmod(mode)
    assert place.library.has_to_be_built()
    built = place.library.library_path()
    assert built.parent == place.replacement()
    assert f"other users can write to {planted.parent} (mode {mode:o}): remove it" in caplog.text


def test_libraries_of_another_user_are_not_loaded(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may change the owner of the folder; another user is taken for a third one."""
    planted = place.library.library_path()
    owner = 4321 if os.geteuid() == 0 else os.geteuid()
    os.chown(planted.parent, owner, -1)
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert place.library.has_to_be_built()
    with contextlib.suppress(NativeUnavailableError):  # as another user, the replacement is foreign as well
        place.library.library_path()
    assert f"{planted.parent} belongs to user {owner}" in caplog.text


def test_without_any_private_folder_the_reasons_are_told(place: Place) -> None:
    place.cache.write_text("a file")
    place.replacement().mkdir()
    place.replacement().chmod(0o777)
    with pytest.raises(NativeUnavailableError, match=r"Not a directory.*; other users can write to .*baton-"):
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
    assert place.library.build_problem() == ""
    built.unlink()
    assert "no C++ compiler" in place.library.build_problem()


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
