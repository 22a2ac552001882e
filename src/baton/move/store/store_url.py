"""Open a store by its URL: `file:///var/cache/kv?bytes=100e9`, `pool://host:8700`, `redis://host/0`, ..."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from baton.core.errors import ConfigError
from baton.core.keys import read_shared_secret
from baton.move.store.encrypted import OVERHEAD_BYTES, EncryptedStore, read_key
from baton.move.store.file import THREADS, FileStore
from baton.move.store.memory import MemoryStore
from baton.move.store.mooncake_store import METRICS_PORT, MooncakePlace, MooncakeStore
from baton.move.store.node_store import STREAMS, NodeStore
from baton.move.store.object_store import ObjectPlace, ObjectStore
from baton.move.store.port import Store
from baton.move.store.redis_store import RedisStore

Open = Callable[[str, int], Store]
"""Opens a store, given a layout's fingerprint and the bytes per block."""

_THREADS_MAX = 64
_TTL_S_MAX = 10 * 365 * 86400


def open_store(url: str, *, layout_fingerprint: str, block_bytes: int, capacity_bytes: int | None = None) -> Store:
    """Open the store of a URL. `bytes=` in the URL overrides `capacity_bytes`.

    Raises ConfigError with every problem of the URL, one per line, or StoreError if the store cannot be opened.
    """
    opened, key_file = parse_store_url(url, capacity_bytes=capacity_bytes)
    if key_file is None:
        return opened(layout_fingerprint, block_bytes)
    return EncryptedStore(
        read_key(key_file),
        layout_fingerprint=layout_fingerprint,
        open_inner=lambda fingerprint: opened(fingerprint, block_bytes + OVERHEAD_BYTES),
    )


def parse_store_url(url: str, *, capacity_bytes: int | None = None) -> tuple[Open, Path | None]:
    """Check a URL without opening the store. Return the function that opens it, and the path of its key file."""
    try:
        parts = urlsplit(url)
        options = _Options(parts, parts.port)
    except ValueError as error:
        raise ConfigError(f"store URL {_shown(url)}: {error}") from None
    reader = _READERS.get(parts.scheme)
    if reader is None:
        raise ConfigError(
            f"store URL {_shown(url)}: there is no kind of store {parts.scheme!r}; there are {', '.join(_READERS)}"
        )
    opened = reader(parts, options, capacity_bytes)
    key_file = options.text("key_file")
    if problems := options.problems():
        raise ConfigError("\n".join(f"store URL {_shown(url)}: {problem}" for problem in problems))
    return opened, None if key_file is None else Path(key_file)


class _Options:
    """Query parameters of a URL. It collects their problems."""

    def __init__(self, parts: SplitResult, port: int | None) -> None:
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        self._given = dict(pairs)
        self._known: list[str] = []
        self._problems = [f"{name} is given twice" for name in self._given if [n for n, _ in pairs].count(name) > 1]
        if port == 0:
            self.wrong("its port is 0")

    def text(self, name: str) -> str | None:
        self._known.append(name)
        value = self._given.get(name)
        if value == "":
            self.wrong(f"{name} is empty")
        return value or None

    def number(self, name: str, *, least: int, most: int) -> int | None:
        """Return a whole number from the URL, or None where it is missing. Exponents are accepted: `bytes=100e9`."""
        value = self.text(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not (least <= number <= most and number == int(number)):
            self.wrong(f"{name}={value} must be a whole number between {least} and {most}")
            return None
        return int(number)

    def choice(self, name: str, allowed: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            self.wrong(f"{name}={value} must be one of {', '.join(allowed)}")
        return value

    def wrong(self, problem: str) -> None:
        self._problems.append(problem)

    def problems(self) -> list[str]:
        unknown: list[str] = []
        for name in self._given.keys() - set(self._known):
            near = difflib.get_close_matches(name, self._known, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(self._known)}"
            unknown.append(f"there is no option {name}{meant}")
        return self._problems + sorted(unknown)


def _capacity(options: _Options, capacity_bytes: int | None) -> int:
    given = options.number("bytes", least=1, most=1 << 60) or capacity_bytes
    if given is None:
        options.wrong("it needs its size, such as bytes=100e9")
    return given or 0


def _file(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    if parts.netloc or not parts.path.startswith("/"):
        options.wrong("the folder must be absolute: file:///var/cache/kv, with three slashes")
    folder, capacity = Path(unquote(parts.path)), _capacity(options, capacity_bytes)
    threads = options.number("threads", least=1, most=_THREADS_MAX) or THREADS
    mode = "buffered" if options.choice("io", ("direct", "buffered")) == "buffered" else "direct"
    return lambda fingerprint, block_bytes: FileStore(
        folder,
        layout_fingerprint=fingerprint,
        block_bytes=block_bytes,
        capacity_bytes=capacity,
        threads=threads,
        mode=mode,
    )


def _memory(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    if parts.netloc or parts.path:
        options.wrong("it takes only options, such as memory://?bytes=1e9")
    capacity = _capacity(options, capacity_bytes)
    return lambda fingerprint, block_bytes: MemoryStore(block_bytes=block_bytes, capacity_bytes=capacity)


def _redis(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    if not parts.hostname:
        options.wrong("it needs a host: redis://host:6379/0")
    ttl_s = options.number("ttl_s", least=1, most=_TTL_S_MAX)
    prefix = options.text("prefix") or "baton"
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return lambda fingerprint, block_bytes: RedisStore(
        plain, layout_fingerprint=fingerprint, block_bytes=block_bytes, prefix=prefix, ttl_s=ttl_s
    )


def _s3(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    if not parts.hostname:
        options.wrong("it needs a bucket: s3://bucket/prefix")
    if parts.username or parts.password:
        options.wrong("access keys do not belong into a URL: put them where the AWS command line finds them")
    endpoint = options.text("endpoint")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        options.wrong(f"endpoint={endpoint} must begin with http:// or https://")
    place = ObjectPlace(
        bucket=parts.hostname or "",
        prefix=unquote(parts.path).strip("/"),
        endpoint=endpoint,
        region=options.text("region"),
    )
    return lambda fingerprint, block_bytes: ObjectStore(place, layout_fingerprint=fingerprint, block_bytes=block_bytes)


def _pool(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    host, port = parts.hostname or "", parts.port or 0
    if not host or not port or parts.path:
        options.wrong("it needs a host and a port, and nothing behind them: pool://host:8700")
    streams = options.number("streams", least=1, most=_THREADS_MAX) or STREAMS
    via = options.choice("via", ("auto", "tcp"))
    secret_file = options.text("secret_file")
    return lambda fingerprint, block_bytes: NodeStore(
        (host, port),
        layout_fingerprint=fingerprint,
        block_bytes=block_bytes,
        streams=streams,
        shares_memory=via != "tcp",
        secret=b"" if secret_file is None else read_shared_secret(Path(secret_file)),
    )


def _mooncake(parts: SplitResult, options: _Options, capacity_bytes: int | None) -> Open:
    host, port = parts.hostname or "", parts.port or 0
    if not host or not port or parts.path:
        options.wrong("it needs the host and port of a master, and nothing behind them: mooncake://host:50051")
    protocol = options.choice("protocol", ("tcp", "rdma")) or "tcp"
    devices = options.text("devices")
    if devices and protocol == "tcp":
        options.wrong("devices are for protocol=rdma")
    place = MooncakePlace(
        host=host,
        port=port,
        metrics_port=options.number("metrics_port", least=1, most=65535) or METRICS_PORT,
        protocol=protocol,
        devices=devices or "",
        local_host=options.text("local_host") or "",
        prefix=options.text("prefix") or "baton",
    )
    return lambda fingerprint, block_bytes: MooncakeStore(
        place, layout_fingerprint=fingerprint, block_bytes=block_bytes
    )


_READERS: dict[str, Callable[[SplitResult, _Options, int | None], Open]] = {
    "file": _file,
    "mooncake": _mooncake,
    "pool": _pool,
    "redis": _redis,
    "rediss": _redis,
    "s3": _s3,
    "memory": _memory,
}


def _shown(url: str) -> str:
    """Return a URL without its password."""
    scheme, slashes, rest = url.partition("://")
    place, mark, query = rest.partition("?")
    return scheme + slashes + place.rpartition("@")[2] + mark + query
