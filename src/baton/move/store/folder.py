"""Metadata in the folder of a file store: the lock, the description of its blocks, and the index."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.errors import StoreError
from baton.core.files import make_private_folder, open_private, open_private_fd
from baton.core.types import BlockHash
from baton.move.store.checksum import CHECKSUM_BYTES, checksum

FORMAT = 1
_LOCK, _DESCRIPTION, _INDEX = "lock", "store.json", "index"
_MARKER, _MARK = "baton-store", b"A KV store of Baton. It may replace every file here.\n"
_UNUSED_NAMES = frozenset((_LOCK, f"{_DESCRIPTION}.new", f"{_MARKER}.new", "lost+found"))
"""Files that do not make a folder foreign: those of a store that was never opened, and those of a new file system."""
_OWN_NAME = re.compile(rf"(?:{_DESCRIPTION}|{_INDEX})(?:\.new)?|{_MARKER}|segment-\d{{4,}}\.kv")


class Description(Struct, frozen=True, kw_only=True):
    """Description of the blocks in a folder. A store can use the files only if its own description is equal."""

    format: int = FORMAT
    layout_fingerprint: str
    block_bytes: int


class IndexEntry(Struct, frozen=True, array_like=True):
    """One block in the index of a clean shutdown."""

    block_hash: BlockHash
    slot: int


class _StoreIndex(Struct, frozen=True, array_like=True):
    sequence: int
    entries: list[IndexEntry]


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed or the process ends.

    Raises StoreError if the folder cannot be used, or is locked by another process.
    """
    try:
        make_private_folder(folder)
        _claim(folder)
        fd = open_private_fd(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(
            f"the KV store in {folder} is in use by process {owner}, this is process {os.getpid()}: "
            "stop that one, or give each host a folder of its own"
        ) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise _unusable(folder, error) from None
    return fd


def _unusable(folder: Path, error: OSError) -> StoreError:
    why = str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        why = f"{file} is a file, and a folder is wanted"
    return StoreError(f"cannot use {folder} as a KV store: {why}; give it a folder that can be written")


def _claim(folder: Path) -> None:
    """Mark a folder as a store's own before anything else is written. Raises StoreError if it has foreign files.

    A store that an older version wrote has no marker; its description and the names of its files identify it.
    """
    marker = folder / _MARKER
    names = {path.name for path in folder.iterdir()}
    if _MARKER in names and marker.read_bytes() == _MARK:
        return
    foreign = sorted(name for name in names - _UNUSED_NAMES if not _OWN_NAME.fullmatch(name))
    if not foreign and names - _UNUSED_NAMES and _DESCRIPTION not in names:
        foreign = sorted(names - _UNUSED_NAMES)
    if foreign:
        raise StoreError(
            f"{folder} is no KV store and is not empty: it has {', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}; give the store an empty folder of its own"
        )
    write_whole(marker, _MARK)


def check_description(folder: Path, ours: Description) -> None:
    """Write the description of a new folder. Raises StoreError if a folder holds blocks of another layout.

    Its blocks are not deleted: they may be the cache of another model that is served at other times. They are not
    moved aside either, because the disk may not have room for the capacity twice.
    """
    path = folder / _DESCRIPTION
    try:
        theirs = msgspec.json.decode(path.read_bytes(), type=Description)
    except FileNotFoundError:
        write_whole(path, msgspec.json.format(msgspec.json.encode(ours)) + b"\n")
        return
    except (msgspec.DecodeError, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}; remove the folder, or give another one") from None
    there, here = msgspec.to_builtins(theirs), msgspec.to_builtins(ours)
    differing = [
        f"{field} {there[field]!r} there, {here[field]!r} here" for field in here if there[field] != here[field]
    ]
    if differing:
        raise StoreError(
            f"{folder} holds KV blocks of another kind ({'; '.join(differing)}): "
            "give each model, KV precision and block size a folder of its own, or remove this one"
        )


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file atomically: after a crash there is the old or the new content."""
    new = path.with_name(path.name + ".new")
    with open_private(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def write_index(folder: Path, *, sequence: int, entries: list[IndexEntry]) -> None:
    """Write the hashes and slots of all blocks, so that the next start need not read every header."""
    data = msgspec.msgpack.encode(_StoreIndex(sequence, entries))
    write_whole(folder / _INDEX, checksum(data) + data)


def take_index(folder: Path) -> tuple[int, list[IndexEntry]] | None:
    """Read and remove the index, because the slots change from now on. Return None if there is no valid index."""
    path = folder / _INDEX
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return None
    if checksum(data[CHECKSUM_BYTES:]) != data[:CHECKSUM_BYTES]:
        return None
    try:
        index = msgspec.msgpack.decode(data[CHECKSUM_BYTES:], type=_StoreIndex)
    except msgspec.DecodeError:
        return None
    return index.sequence, index.entries
