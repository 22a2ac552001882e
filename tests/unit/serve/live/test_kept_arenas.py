"""Tables of kept arenas: each is used once, by a server that knows the same arena."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.core.config import SurvivalConfig
from baton.core.prefixes import SealedBlock
from baton.core.types import BlockHash, BlockId
from baton.serve.live.kept_arenas import ArenaTable, KeptArenas

ARENA, OTHER = "a" * 32, "b" * 32
TABLE = ArenaTable(blocks_total=8, blocks=(SealedBlock(BlockId(3), BlockHash(b"x"), None, 0, "tenant"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "streams"


def arenas(folder: Path) -> KeptArenas:
    """Return the tables as each new server sees them."""
    return KeptArenas(SurvivalConfig(resume_folder=str(folder), resume_s=60.0))


def test_a_table_is_taken_once(folder: Path) -> None:
    arenas(folder).save({ARENA: TABLE})
    assert arenas(folder).take(OTHER, 8) == ()
    assert arenas(folder).take(ARENA, 8) == TABLE.blocks
    assert arenas(folder).take(ARENA, 8) == ()


def test_an_arena_of_another_size_gets_no_blocks(folder: Path) -> None:
    arenas(folder).save({ARENA: TABLE})
    assert arenas(folder).take(ARENA, 9) == ()


def test_an_expired_table_is_deleted(folder: Path) -> None:
    arenas(folder).save({ARENA: TABLE})
    (file,) = folder.iterdir()
    os.utime(file, (0, 0))
    assert arenas(folder).take(ARENA, 8) == ()
    assert not file.exists()


@pytest.mark.parametrize("arena_id", ["", "../../etc/passwd", "A" * 32])
def test_a_wrong_id_names_no_file(folder: Path, arena_id: str) -> None:
    assert arenas(folder).take(arena_id, 8) == ()


def test_a_damaged_table_counts_as_none(folder: Path) -> None:
    arenas(folder).save({ARENA: TABLE})
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert arenas(folder).take(ARENA, 8) == ()


def test_a_folder_that_cannot_be_written_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file")
    arenas(folder).save({ARENA: TABLE})
    assert "cannot be written" in caplog.text
