"""The folder of a file store: whose it is, what it is for, and what was in it when it was closed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.checksum import CHECKSUM_BYTES, checksum

FORMAT = 1
_LOCK, _DESCRIPTION, _INDEX = "lock", "store.json", "index"


class Description(Struct, frozen=True, kw_only=True):
    """What the blocks of a folder are. Two stores may use the same files only if theirs are equal."""

    format: int = FORMAT
    layout_fingerprint: str
    block_bytes: int


class IndexEntry(Struct, frozen=True, array_like=True):
    """One block of a store that was closed in order."""

    name: BlockHash
    slot: int


class _Index(Struct, frozen=True, array_like=True):
    sequence: int
    entries: list[IndexEntry]


def lock_folder(folder: Path) -> int:
    """Make it ours until the descriptor that this returns is closed, or the process ends in whatever way.

    Raises StoreError, with the other process's id, where it is somebody else's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
            why = f"{file} is a file, and a folder is wanted"
        raise StoreError(f"cannot use {folder} as a KV store: {why}; give it a folder that can be written") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(
            f"the KV store in {folder} is in use by process {owner}, this is process {os.getpid()}: "
            "stop that one, or give each host a folder of its own"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def check_description(folder: Path, ours: Description) -> None:
    """Describe a new folder. Raises StoreError where an old one holds blocks of another layout.

    They are refused, not thrown away or set aside: they may be the cache of another model that is served at other
    times, and a second copy of the capacity may not fit on the disk.
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
    """Write a small file so that after a crash there is the old one or the new one."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
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
    """Note what is in the slots, so that the next opening need not look into each."""
    data = msgspec.msgpack.encode(_Index(sequence, entries))
    write_whole(folder / _INDEX, checksum(data) + data)


def take_index(folder: Path) -> tuple[int, list[IndexEntry]] | None:
    """Read what `write_index` noted, and remove it: from here on the slots change. None: look into the slots."""
    path = folder / _INDEX
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return None
    if checksum(data[CHECKSUM_BYTES:]) != data[:CHECKSUM_BYTES]:
        return None
    try:
        index = msgspec.msgpack.decode(data[CHECKSUM_BYTES:], type=_Index)
    except msgspec.DecodeError:
        return None
    return index.sequence, index.entries
