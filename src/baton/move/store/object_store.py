"""Store in an S3-compatible object store, shared by all hosts. Its lifecycle rules evict blocks."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.direct_io import copy_bytes
from baton.move.store.port import StoreCounters
from baton.move.store.reachability import Reachability
from baton.move.store.slot_header import HEADER_BYTES, detached_header, matches_header, parse_block_hash

THREADS = 8
"""Concurrent requests: an object store has a high latency."""
TIMEOUT_S, CONNECT_TIMEOUT_S, RETRY_S = 10, 2, 5


class ObjectPlace(Struct, frozen=True, kw_only=True):
    """Location of the objects, and credentials. The client library replaces a None by AWS's credential chain."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    """http://host:port of a store that is not Amazon's. Its buckets are addressed by path instead of by host name."""
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")


class ObjectStore:
    """One object per block: a header with its hash and checksum, then its bytes. A put is atomic."""

    name = "s3"
    capacity_blocks: int | None = None

    def __init__(self, place: ObjectPlace, *, layout_fingerprint: str, block_bytes: int) -> None:
        """Connect. Raises StoreError if the package is missing, or the bucket is unreachable or not readable."""
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise StoreError("s3:// needs the package obstore: pip install 'baton[s3]'") from None
        self._layout = fingerprint_digest(layout_fingerprint)
        self._block_bytes = block_bytes
        self._obstore = obstore
        self._place = place
        self._failures: tuple[type[Exception], ...] = (BaseError, OSError)
        try:
            self._bucket = S3Store(place.bucket, **_settings(place, self._layout.hex()))
            self._ask()
        except self._failures as error:
            raise StoreError(
                f"cannot use {place} as a KV store ({_first_line(error)}): "
                "correct bucket, endpoint, region or access key"
            ) from None
        self._reach = Reachability(str(place), self._ask, self._failures)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="baton-objects")
        self._lock = threading.Lock()

    @property
    def counters(self) -> StoreCounters:
        return self._reach.counters

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        new = {block_hash: memory.cast("B") for block_hash, memory in blocks if memory.nbytes == self._block_bytes}
        kept = dict(zip(new, self._each(self._put, list(new.items())), strict=True))
        answers = [memory.nbytes == self._block_bytes and kept[block_hash] for block_hash, memory in blocks]
        self._reach.count(refused=answers.count(False))
        return answers

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        found = self._each(self._get, list(blocks))
        self._reach.count(hits=found.count(True), misses=found.count(False))
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """Delete the objects. `dropped` counts all hashes, because the store does not report which objects existed."""
        paths = [block_hash.hex() for block_hash in dict.fromkeys(hashes)]
        if not paths or not self._reach.is_open:
            return
        try:
            self._obstore.delete(self._bucket, paths)
        except self._failures as error:
            self._fail(error)
        else:
            self._reach.count(dropped=len(paths))

    def held(self) -> list[BlockHash]:
        try:
            objects = [entry for part in self._obstore.list(self._bucket) for entry in part]
        except self._failures as error:
            raise StoreError(f"{self._place} does not list its objects: {_first_line(error)}") from None
        aged = sorted(objects, key=lambda entry: entry["last_modified"])
        return [block_hash for entry in aged if (block_hash := parse_block_hash(entry["path"])) is not None]

    def close(self) -> None:
        self._reach.close()
        self._threads.shutdown()

    def _ask(self) -> None:
        """Check bucket, permissions and reachability by listing at most one object."""
        next(iter(self._obstore.list(self._bucket, chunk_size=1)), None)

    def _each(
        self, call: Callable[[tuple[BlockHash, memoryview]], bool], blocks: list[tuple[BlockHash, memoryview]]
    ) -> list[bool]:
        if not self._reach.is_open:
            return [False] * len(blocks)
        return list(self._threads.map(call, blocks) if len(blocks) > 1 else map(call, blocks))

    def _put(self, block: tuple[BlockHash, memoryview]) -> bool:
        block_hash, memory = block
        if not self._reach.is_open:
            return False
        try:
            if self._is_there(block_hash):
                return True
            header = detached_header(block_hash, memory, layout=self._layout)
            self._obstore.put(self._bucket, block_hash.hex(), header + memory)
        except self._failures as error:
            self._fail(error)
            return False
        self._reach.count(put=1)
        return True

    def _is_there(self, block_hash: BlockHash) -> bool:
        try:
            return self._obstore.head(self._bucket, block_hash.hex())["size"] == HEADER_BYTES + self._block_bytes
        except FileNotFoundError:
            return False

    def _get(self, block: tuple[BlockHash, memoryview]) -> bool:
        block_hash, memory = block
        if memory.nbytes != self._block_bytes or not self._reach.is_open:
            return False
        try:
            data = memoryview(self._obstore.get(self._bucket, block_hash.hex()).bytes())
        except FileNotFoundError:
            return False
        except self._failures as error:
            self._fail(error)
            return False
        return self._fits(block_hash, data, memory.cast("B"))

    def _fits(self, block_hash: BlockHash, data: memoryview, memory: memoryview) -> bool:
        if data.nbytes == HEADER_BYTES + self._block_bytes:
            copy_bytes(memory, data[HEADER_BYTES:])
            if matches_header(data[:HEADER_BYTES], block_hash, memory, layout=self._layout):
                return True
        self._reach.count(damaged=1)
        self.drop([block_hash])
        return False

    def _fail(self, error: Exception) -> None:
        """Note a failure. A permission error is an answer of the server; any other error counts as unreachable."""
        if isinstance(error, PermissionError) or type(error).__name__ in (
            "PermissionDeniedError",
            "UnauthenticatedError",
        ):
            self._reach.refused(error)
        else:
            self._reach.lost(Exception(_first_line(error)))


def _settings(place: ObjectPlace, layout: str) -> dict[str, Any]:
    """Return the settings of the client library."""
    given = {
        "endpoint": place.endpoint,
        "region": place.region,
        "access_key_id": place.access_key_id,
        "secret_access_key": place.secret_access_key,
        "virtual_hosted_style_request": False if place.endpoint else None,
    }
    return {
        "prefix": "/".join(part for part in (place.prefix, layout) if part),
        "config": {key: value for key, value in given.items() if value is not None},
        "client_options": {
            "timeout": f"{TIMEOUT_S}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
            "allow_http": (place.endpoint or "").startswith("http://"),
        },
        "retry_config": {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=RETRY_S)},
    }


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
