"""Keep uploaded files and batches in a folder. Thread-safe. All methods block while they use files."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError, RequestError
from baton.core.files import make_private_folder, open_private
from baton.core.http_config import BatchesConfig
from baton.move.clock import unix_s
from baton.serve.http.wire.files import Batch, ExpiresAfter, FileObject, Purpose, Status, UploadForm

OPEN_STATUSES: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_ID = re.compile(r"(file|batch)-[0-9a-f]{24}")
Kept = TypeVar("Kept", bound=Struct)


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file and its owner."""

    owner: str
    file: FileObject


class StoredBatch(Struct, frozen=True, kw_only=True):
    """A batch, and the properties of the key that created it. The key itself is not kept."""

    owner: str
    key: str
    tenant: str
    cache_namespace: str
    batch: Batch


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """The files that a running batch appends its results to, one JSON line per request."""

    output: Path
    errors: Path


class Folder:
    """The folder of the files and batches of all clients, with a JSON record for each."""

    def __init__(self, path: str) -> None:
        """Create the folder. Raises ConfigError if that fails, or if another server uses it.

        `path`: empty for a temporary folder, which is made for the first file and removed by `close`.
        """
        self._is_temporary = not path
        temporary = Path(tempfile.gettempdir()) / f"baton-batches-{secrets.token_hex(8)}"
        self.path = temporary if self._is_temporary else Path(path)
        self.lock = threading.Lock()
        self._is_closed = False
        self._owned = None if self._is_temporary else self._own()

    def _own(self) -> BinaryIO:
        """Make the folder and lock it, because two servers would run its batches twice."""
        lock: BinaryIO | None = None
        try:
            make_private_folder(self.path)
            lock = open_private(self.path / "lock", "ab")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock is not None:
                lock.close()
            why = "another server uses it" if isinstance(error, BlockingIOError) else error.strerror
            message = f"batches.folder: the folder {self.path} cannot be used: {why}; choose another --batch-folder"
            raise ConfigError(message) from error
        return lock

    def make(self) -> None:
        """Make the folder, if it is temporary. Raises RequestError (503) after `close`."""
        if self._is_closed:
            raise RequestError("the server is shutting down", status=503, code="shutdown")
        make_private_folder(self.path)

    def close(self) -> None:
        """Leave the folder to a later server, or remove a temporary one."""
        with self.lock:
            self._is_closed = True
        if self._owned is not None:
            self._owned.close()
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, record_id: str, record: Struct) -> None:
        """Write a record. A crash leaves the old or the new one."""
        path = self.path / f"{record_id}.json"
        with open_private(path.with_suffix(".new"), "wb") as file:
            file.write(msgspec.json.encode(record))
        path.with_suffix(".new").replace(path)

    def read(self, record_id: str, kind: type[Kept]) -> Kept | None:
        """Return a record. None: there is none."""
        if _ID.fullmatch(record_id) is None:
            return None
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.path / f"{record_id}.json").read_bytes(), type=kind)
        return None

    def all(self, prefix: str, kind: type[Kept]) -> Iterator[Kept]:
        """Yield the records whose ids begin with a prefix."""
        for path in self.path.glob(f"{prefix}-*.json"):
            record = self.read(path.stem, kind)
            if record is not None:
                yield record

    def remove(self, record_id: str) -> None:
        (self.path / f"{record_id}.json").unlink(missing_ok=True)


class FileStore:
    """The files of all clients, by their ids. A client sees those of its own owner name."""

    def __init__(self, folder: Folder, config: BatchesConfig) -> None:
        self._folder = folder
        self._config = config

    def add(self, owner: str, name: str, content: bytes, form: UploadForm) -> FileObject:
        """Keep a file. Raises RequestError (507) if the folder or its disk is full."""
        config = self._config
        with self._folder.lock:
            self._folder.make()
            mine: list[int] = []
            for stored in self._folder.all("file", StoredFile):
                if self._has_expired(stored.file):
                    self._remove(stored.file.id)
                elif stored.owner == owner:
                    mine.append(stored.file.bytes)
            held = [path.stat().st_size for path in self._folder.path.glob("file-*.data")]
            share = _share(owner)
            self._check_room("this client", mine, len(content), config.files_max // share, config.bytes_max // share)
            self._check_room("this server", held, len(content), config.files_max, config.bytes_max)
            file_id = new_id("file")
            try:
                with open_private(self._data(file_id), "wb") as data:
                    data.write(content)
                return self._record(owner, file_id, name[:256], form.purpose, form.expires_after)
            except OSError as error:
                self._remove(file_id)
                message = f"the server cannot write to batches.folder: {error.strerror}; ask its operator"
                raise RequestError(message, status=507, code="files_full") from error

    def _check_room(self, keeper: str, held: Sequence[int], more_bytes: int, files_max: int, bytes_max: int) -> None:
        """Raise RequestError (507) if no further file may be kept. `held`: sizes of the kept files."""
        if len(held) >= files_max or sum(held) + more_bytes > bytes_max:
            raise RequestError(
                f"{keeper} keeps {len(held)} files with {sum(held)} bytes, and may keep {files_max} with {bytes_max}"
                " (batches.files_max, batches.bytes_max; of several tenants, each may keep half); delete some",
                status=507,
                code="files_full",
            )

    def adopt(self, owner: str, name: str, path: Path) -> str | None:
        """Keep results as a file, and return its id. None: there are none. Limits do not apply: no result is lost.

        A second call for the same name, after a crash, returns the same file.
        """
        file_id = f"file-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        with self._folder.lock:
            if path.stat().st_size:
                path.replace(self._data(file_id))
            path.unlink(missing_ok=True)
            if not self._data(file_id).exists():
                return None
            self._record(owner, file_id, name, "batch_output")
        return file_id

    def get(self, owner: str, file_id: str) -> FileObject:
        """Return a file's properties. Raises RequestError (404) if the owner has no such file."""
        stored = self._folder.read(file_id, StoredFile)
        if stored is None or stored.owner != owner or self._has_expired(stored.file):
            raise RequestError(f"there is no file {file_id[:80]!r}", param="file_id", status=404, code="file_not_found")
        return stored.file

    def list(self, owner: str, purpose: str | None = None) -> list[FileObject]:
        """Return the owner's files of a purpose, or all, the newest first."""
        mine = [stored.file for stored in self._folder.all("file", StoredFile) if stored.owner == owner]
        found = [file for file in mine if purpose in (None, file.purpose) and not self._has_expired(file)]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def content(self, owner: str, file_id: str) -> Path:
        """Return the path of a file's content. Raises RequestError (404)."""
        self.get(owner, file_id)
        return self._data(file_id)

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises RequestError (404, or 409 while a batch uses it)."""
        with self._folder.lock:
            self.get(owner, file_id)
            if self._is_used(file_id):
                message = "a running batch uses this file; cancel the batch first"
                raise RequestError(message, status=409, code="file_in_use")
            self._remove(file_id)

    def _is_used(self, file_id: str) -> bool:
        batches = [stored.batch for stored in self._folder.all("batch", StoredBatch)]
        return any(batch.input_file_id == file_id and batch.status in OPEN_STATUSES for batch in batches)

    def _has_expired(self, file: FileObject) -> bool:
        """Return whether a file's time is over. A batch that has begun may still read it."""
        return file.expires_at is not None and file.expires_at <= unix_s() and not self._is_used(file.id)

    def _remove(self, file_id: str) -> None:
        self._data(file_id).unlink(missing_ok=True)
        self._folder.remove(file_id)

    def _data(self, file_id: str) -> Path:
        return self._folder.path / f"{file_id}.data"

    def _record(
        self, owner: str, file_id: str, name: str, purpose: Purpose, expires: ExpiresAfter | None = None
    ) -> FileObject:
        created_at = unix_s()
        file = FileObject(
            id=file_id,
            bytes=self._data(file_id).stat().st_size,
            created_at=created_at,
            expires_at=None if expires is None else created_at + expires.seconds,
            filename=name,
            purpose=purpose,
        )
        self._folder.write(file_id, StoredFile(owner=owner, file=file))
        return file


class BatchStore:
    """The batches of all clients, by their ids. A client sees those of its own owner name."""

    def __init__(self, folder: Folder, batches_max: int) -> None:
        self._folder = folder
        self._batches_max = batches_max

    def add(self, stored: StoredBatch) -> None:
        """Keep a new batch, and forget the oldest ended ones beyond the limit.

        Raises RequestError (429) if its owner, or all owners, have too many open.
        """
        with self._folder.lock:
            self._make_room(self.list(stored.owner), self._batches_max // _share(stored.owner))
            self._make_room(self.list(), self._batches_max)
            self._folder.write(stored.batch.id, stored)

    def _make_room(self, held: Sequence[StoredBatch], batches_max: int) -> None:
        """Forget the oldest ended batches. Raises RequestError (429) if too many are open. `held`: the newest first."""
        ended = [each.batch.id for each in held if each.batch.status not in OPEN_STATUSES]
        excess = len(held) + 1 - batches_max
        if excess > len(ended):
            message = f"{len(held) - len(ended)} batches are open, at most {batches_max} may be"
            message = f"{message} (batches.batches_max; of several tenants, each may have half); wait until one ends"
            raise RequestError(message, status=429, code="too_many_batches")
        for batch_id in ended[len(ended) - max(0, excess) :]:
            self._folder.remove(batch_id)

    def save(self, stored: StoredBatch) -> None:
        with self._folder.lock:
            self._folder.write(stored.batch.id, stored)

    def get(self, owner: str, batch_id: str) -> StoredBatch:
        """Return a batch. Raises RequestError (404) if the owner has no such batch."""
        stored = self._folder.read(batch_id, StoredBatch)
        if stored is None or stored.owner != owner:
            message = f"there is no batch {batch_id[:80]!r}"
            raise RequestError(message, param="batch_id", status=404, code="batch_not_found")
        return stored

    def list(self, owner: str | None = None) -> list[StoredBatch]:
        """Return the batches of an owner, or of all, the newest first."""
        found = [each for each in self._folder.all("batch", StoredBatch) if owner is None or each.owner == owner]
        return sorted(found, key=lambda each: (each.batch.created_at, each.batch.id), reverse=True)

    def results(self, batch_id: str) -> ResultFiles:
        """Return the files that the batch appends to. A last line that a crash has cut off is removed."""
        path = self._folder.path
        files = ResultFiles(path / f"{batch_id}.output", path / f"{batch_id}.errors")
        for path in (files.output, files.errors):
            with open_private(path, "ab") as file:
                size_bytes = file.tell()
            if size_bytes:  # results may exceed the memory
                with path.open("r+b") as file:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        end = data.rfind(b"\n") + 1
                    file.truncate(end)
        return files


def _share(owner: str) -> int:
    """Return 2 if the owner is one of several tenants, each of which may fill half of the folder, else 1."""
    return 2 if owner.partition("\0")[2] else 1  # see `owner_of`


def new_id(kind: Literal["file", "batch"]) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
