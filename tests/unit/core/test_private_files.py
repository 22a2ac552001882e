"""Every file that Baton makes has mode 0600 and every folder 0700, whatever the umask is."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cli.output import write_json
from baton.core import files
from baton.core.files import make_private_folder, open_private
from baton.core.types import HostId, StepShape, WorkerId
from baton.decide.control.decision_log import SimHeader
from baton.move.compiling import NativeSources
from baton.move.store.file import FileStore
from baton.move.store.segments import slot_bytes
from baton.serve.live.log_file import LogWriter
from baton.serve.worker.step_log import StepLogWriter
from tests.stores import names, put

BLOCK_BYTES = 4096
WRITES = re.compile(r"""\.open\(["'][wax]|\.open\(mode|\.write_(?:text|bytes)\(|\.mkdir\(|makedirs\(""")
SOURCE = Path(files.__file__).parents[1]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _store(folder: Path) -> None:
    capacity_bytes = 4 * slot_bytes(BLOCK_BYTES)
    store = FileStore(
        folder / "tier" / "kv", layout_fingerprint="a layout", block_bytes=BLOCK_BYTES, capacity_bytes=capacity_bytes
    )
    assert put(store, names(2), BLOCK_BYTES) == [True, True]
    store.close()


def _step_log(folder: Path) -> None:
    log = StepLogWriter(folder / "steps" / "today", WorkerId("decode-0"), 1 << 20)
    log.note(StepShape(), at_s=0.0, engine_s=1.0, turn_s=1.0)
    log.close()


def _decision_log(folder: Path) -> None:
    LogWriter(folder / "decisions.log", SimHeader(cluster="", policy="published"), 1 << 20).close()


def _results(folder: Path) -> None:
    write_json(folder / "results.json", HostId("h"))


def _library(folder: Path) -> None:
    sources = folder / "sources"
    make_private_folder(sources)
    with open_private(sources / "one.cpp", "wb") as file:
        file.write(b"int one() { return 1; }\n")
    NativeSources(name="one", folder=sources, flags=("-shared", "-fPIC"), units={"one": ()}).library_path()


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("make", [_store, _step_log, _decision_log, _results, _library])
def test_no_other_user_can_read_a_file(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    make(tmp_path)
    made = list(tmp_path.rglob("*"))
    assert any(path.is_file() for path in made)
    open_to_others = {str(path): oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077}
    assert not open_to_others


def test_an_old_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    path.touch(0o644)
    _decision_log(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_module_writes_a_file_in_another_way() -> None:
    lines = {
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if WRITES.search(line)
    }
    assert lines == {"core/files.py: path.mkdir(mode=0o700, exist_ok=True)"}
