"""Store on a Redis or Valkey server. Blocks are split into pieces; the server's policy evicts them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.direct_io import copy_bytes
from baton.move.store.port import StoreCounters
from baton.move.store.reachability import Reachability
from baton.move.store.slot_header import HEADER_BYTES, detached_header, matches_header, parse_block_hash

if TYPE_CHECKING:
    import redis

log = logging.getLogger("baton.store")

PIECE_BYTES = 1 << 20
"""Size of a value. Redis moves larger ones at a fraction of the speed, and blocks all other clients meanwhile."""
PIPELINE_BYTES = 4 << 20
"""Bytes per pipeline. The client buffers all answers, and a larger buffer is slower because its pages are new."""
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 2.0

Outcome = Literal["whole", "missing", "torn", "damaged", "lost"]


class RedisStore:
    """One value per piece of a block, and a header value with its hash and checksum, written last.

    Several hosts may share a server. Blocks are evicted by its `maxmemory-policy` or expire after `ttl_s`.
    """

    name = "redis"
    capacity_blocks: int | None = None

    def __init__(
        self, url: str, *, layout_fingerprint: str, block_bytes: int, prefix: str = "baton", ttl_s: int | None = None
    ) -> None:
        """Connect. Raises StoreError if the package is missing or the server does not answer."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise StoreError("redis:// needs the package redis: pip install 'baton[redis]'") from None
        self._layout = fingerprint_digest(layout_fingerprint)
        self._block_bytes = block_bytes
        self._pieces = max(1, -(-block_bytes // PIECE_BYTES))
        self._prefix = f"{prefix}:{self._layout.hex()}:".encode()
        self._ttl_s = ttl_s
        self._lost = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
        self._refused = redis.exceptions.RedisError
        self._where = _without_password(url)
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=ANSWER_TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),
                health_check_interval=30,
            )
            self._client.ping()
        except (redis.exceptions.RedisError, ValueError) as error:
            raise StoreError(
                f"no Redis answers at {self._where} ({error}): start it, or correct host, port and password"
            ) from None
        self._reach = Reachability(self._where, self._ask, (redis.exceptions.RedisError,))
        self._warn_if_unbounded()

    @property
    def counters(self) -> StoreCounters:
        return self._reach.counters

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        new = {block_hash: memory.cast("B") for block_hash, memory in blocks if memory.nbytes == self._block_bytes}
        kept = self._existing(list(new)) if new else set()
        for group in self._groups(
            [(block_hash, memory) for block_hash, memory in new.items() if block_hash not in kept]
        ):
            kept |= self._put_group(group)
        answers = [block_hash in kept and memory.nbytes == self._block_bytes for block_hash, memory in blocks]
        self._reach.count(refused=answers.count(False))
        return answers

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        wanted = [(block_hash, memory.cast("B")) for block_hash, memory in blocks if memory.nbytes == self._block_bytes]
        outcomes = iter([outcome for group in self._groups(wanted) for outcome in self._get_group(group)])
        found = [memory.nbytes == self._block_bytes and next(outcomes) == "whole" for _, memory in blocks]
        self._reach.count(hits=found.count(True), misses=found.count(False))
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        unique = list(dict.fromkeys(hashes))
        if not unique or not self._reach.is_open:
            return
        self._reach.count(dropped=sum(isinstance(answer, int) and answer > 0 for answer in self._unlink(unique)))

    def held(self) -> list[BlockHash]:
        """List the blocks of this layout, of all hosts, in no order: the server does not know their age."""
        name_chars = slice(len(self._prefix), None)
        try:
            keys = [key[name_chars] for key in self._client.scan_iter(match=self._prefix + b"*", count=1000)]
        except self._refused as error:
            raise StoreError(f"the Redis at {self._where} does not list its keys: {error}") from None
        parsed = (parse_block_hash(key.decode(errors="replace")) for key in dict.fromkeys(keys))
        return [block_hash for block_hash in parsed if block_hash is not None]

    def close(self) -> None:
        self._reach.close()
        self._client.close()

    def _ask(self) -> None:
        self._client.ping()

    def _key(self, block_hash: BlockHash) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _piece_keys(self, block_hash: BlockHash) -> list[bytes]:
        return [self._key(block_hash) + b":%d" % piece for piece in range(self._pieces)]

    def _piece_slices(self) -> list[slice]:
        return [slice(start, start + PIECE_BYTES) for start in range(0, self._block_bytes, PIECE_BYTES)]

    def _groups(self, blocks: list[tuple[BlockHash, memoryview]]) -> Iterator[list[tuple[BlockHash, memoryview]]]:
        count = max(1, PIPELINE_BYTES // self._block_bytes)
        return (blocks[start : start + count] for start in range(0, len(blocks), count))

    def _execute(self, commands: Sequence[tuple[object, ...]]) -> list[object]:
        """Send commands in one pipeline. Return the answers, errors included, or [] if the server is unreachable."""
        if not self._reach.is_open:
            return []
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers = pipeline.execute(raise_on_error=False)
        except self._refused as error:
            self._fail(error)
            return []
        for answer in answers:
            if isinstance(answer, self._refused):
                self._fail(answer)
                break
        return answers

    def _fail(self, error: redis.RedisError) -> None:
        if isinstance(error, self._lost):
            self._reach.lost(error)
        else:
            self._reach.refused(error)

    def _existing(self, hashes: list[BlockHash]) -> set[BlockHash]:
        answers = self._execute(
            [("EXISTS", self._key(block_hash), *self._piece_keys(block_hash)) for block_hash in hashes]
        )
        return {block_hash for block_hash, answer in zip(hashes, answers, strict=False) if answer == self._pieces + 1}

    def _put_group(self, group: list[tuple[BlockHash, memoryview]]) -> set[BlockHash]:
        ending = () if self._ttl_s is None else ("EX", self._ttl_s)
        commands: list[tuple[object, ...]] = []
        for block_hash, memory in group:
            pieces = zip(self._piece_keys(block_hash), self._piece_slices(), strict=True)
            commands += [("SET", key, memory[piece], *ending) for key, piece in pieces]
            commands.append(
                ("SET", self._key(block_hash), detached_header(block_hash, memory, layout=self._layout), *ending)
            )
        answers = self._execute(commands)
        each = self._pieces + 1
        kept = {
            block_hash
            for index, (block_hash, _) in enumerate(group)
            if len(answers) == len(commands)
            and not any(isinstance(answer, Exception) for answer in answers[index * each : (index + 1) * each])
        }
        self._reach.count(put=len(kept))
        return kept

    def _get_group(self, group: list[tuple[BlockHash, memoryview]]) -> list[Outcome]:
        commands = [
            ("GET", key) for block_hash, _ in group for key in (self._key(block_hash), *self._piece_keys(block_hash))
        ]
        answers, each = self._execute(commands), self._pieces + 1
        if len(answers) != len(commands):
            return ["lost"] * len(group)
        outcomes = [
            self._outcome(block_hash, memory, answers[index * each : (index + 1) * each])
            for index, (block_hash, memory) in enumerate(group)
        ]
        useless = [
            block_hash
            for (block_hash, _), outcome in zip(group, outcomes, strict=True)
            if outcome in ("damaged", "torn")
        ]
        if useless:
            self._reach.count(damaged=outcomes.count("damaged"))
            self._unlink(useless)
        return outcomes

    def _unlink(self, hashes: list[BlockHash]) -> list[object]:
        """Remove all values of blocks. Return how many values of each block existed."""
        return self._execute(
            [("UNLINK", self._key(block_hash), *self._piece_keys(block_hash)) for block_hash in hashes]
        )

    def _outcome(self, block_hash: BlockHash, memory: memoryview, answers: Sequence[object]) -> Outcome:
        """Join the pieces and verify them. A block with missing pieces is "torn": some were evicted or dropped."""
        if not all(isinstance(answer, bytes) for answer in answers):
            return "torn" if any(isinstance(answer, bytes) for answer in answers) else "missing"
        header, *pieces = [answer for answer in answers if isinstance(answer, bytes)]
        if len(header) != HEADER_BYTES or sum(map(len, pieces)) != memory.nbytes:
            return "damaged"
        start = 0
        for piece in pieces:
            copy_bytes(memory[start : start + len(piece)], memoryview(piece))
            start += len(piece)
        return "whole" if matches_header(header, block_hash, memory, layout=self._layout) else "damaged"

    def _warn_if_unbounded(self) -> None:
        try:
            limit = self._client.config_get("maxmemory").get("maxmemory")
        except self._refused:
            return  # a hosted server does not reveal its settings
        if limit == "0" and self._ttl_s is None:
            log.warning(
                "the Redis at %s has no maxmemory and its blocks no ttl_s: it grows until its machine is out of memory",
                self._where,
            )


def _without_password(url: str) -> str:
    """Return the URL of a server without its password, for logs and errors."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
