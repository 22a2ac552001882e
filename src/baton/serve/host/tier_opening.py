"""Open the stores of a host's tiers, as configured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from baton.core.errors import BatonError, ConfigError, StoreError
from baton.core.files import placed
from baton.core.kv_config import TierConfig
from baton.decide.kv.identity import KVIdentity
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.packing import Packing
from baton.decide.kv.tier import TierRules
from baton.move.store.packed import PackedStore
from baton.move.store.port import Store
from baton.move.store.store_url import open_store, parse_store_url

_PLACES_DEFAULT = 1_000_000
"""Maximum block hashes that the pool remembers for a store of unknown capacity."""


@dataclass(slots=True)
class OpenTier:
    """A tier with its store."""

    rules: TierRules
    store: Store
    list_s: float = 0.0
    """Seconds between two listings of the store's blocks. 0: they are listed once."""

    @property
    def name(self) -> str:
        return self.rules.name


@dataclass(frozen=True, slots=True)
class UnopenedTier:
    """A tier whose store could not be opened."""

    rules: TierRules
    """Rules with the maximum capacity, because the store's own is not known yet."""
    problem: str
    open: Callable[[], OpenTier]
    """Opens the store. Raises StoreError or ConfigError if it still cannot be opened."""


def is_shared(url: str) -> bool:
    """Return whether all hosts share the store at this URL, instead of each having its own."""
    return url.partition(":")[0] not in ("file", "memory")


def check_tiers(configs: Sequence[TierConfig]) -> None:
    """Check every URL without opening a store. Raises ConfigError with all problems."""
    problems: list[str] = []
    for number, config in enumerate(configs):
        try:
            parse_store_url(config.url)
        except ConfigError as error:
            problems += placed(f"tiers[{number}]", error)
    if problems:
        raise ConfigError("\n".join(problems))


def open_tiers(configs: Sequence[TierConfig], *, layout: KVLayout, fingerprint: str) -> list[OpenTier]:
    """Open all stores for blocks of this layout and fingerprint (see `fingerprint_of`).

    Raises ConfigError with the problems of every URL and store; no store is open then.
    """
    found = open_usable_tiers(configs, layout=layout, fingerprint=fingerprint)
    problems = [tier.problem for tier in found if isinstance(tier, UnopenedTier)]
    if problems:
        _close(found)
        raise ConfigError("\n".join(problems))
    return [tier for tier in found if isinstance(tier, OpenTier)]


def open_usable_tiers(
    configs: Sequence[TierConfig], *, layout: KVLayout, fingerprint: str, wait_s: float | None = None
) -> list[OpenTier | UnopenedTier]:
    """Open the available stores. Return every tier, with its problem if its store could not be opened.

    A tier has the same name in both cases. Raises ConfigError, with no store open, if an URL is invalid. `wait_s`:
    deadline for each store; a slow one counts as unopened until it is open. None: no deadline.
    """
    check_tiers(configs)
    found: list[OpenTier | UnopenedTier] = []
    kinds: set[str] = set()
    for number, config in enumerate(configs):
        kind = config.url.partition(":")[0]
        name = kind if kind not in kinds else f"{kind}-{number}"
        kinds.add(kind)
        packing = _packing_of(config, layout)
        if packing is not None and (problems := packing.problems()):
            _close(found)
            raise ConfigError("\n".join(f"tiers[{number}].format is {config.format}: {what}" for what in problems))
        opens = _TierOpener(name, config, layout, fingerprint, packing)
        try:
            found.append(opens() if wait_s is None else _open_in_time(opens, wait_s))
        except StoreError as error:
            found.append(UnopenedTier(opens.rules(), f"tiers[{number}]: {error}", opens))
        except ConfigError as error:
            _close(found)
            raise ConfigError("\n".join(placed(f"tiers[{number}]", error))) from error
    return found


@dataclass(frozen=True, slots=True)
class _TierOpener:
    """Opens the store of one tier."""

    name: str
    config: TierConfig
    layout: KVLayout
    fingerprint: str
    packing: Packing | None
    """Format of the tier's blocks. None: that of the arena."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the store."""
        return self.layout.block_bytes if self.packing is None else self.packing.block_bytes

    @property
    def stored_fingerprint(self) -> str:
        """The fingerprint, with the format of the tier's blocks."""
        packing = self.packing
        return self.fingerprint if packing is None else f"{self.fingerprint} {packing.dtype} {packing.exact_layers}"

    def __call__(self) -> OpenTier:
        config = self.config
        store = open_store(config.url, layout_fingerprint=self.stored_fingerprint, block_bytes=self.block_bytes)
        if self.packing is not None:
            store = PackedStore(store, self.packing)
        return OpenTier(self.rules(store), store, config.list_s if is_shared(config.url) else 0.0)

    def rules(self, store: Store | None = None) -> TierRules:
        """Return the tier's rules. Without `store`, the capacity of a shared store is unknown."""
        config, shares = self.config, is_shared(self.config.url)
        capacity_blocks = store.capacity_blocks if store is not None else None
        return TierRules(
            name=self.name,
            shared_as=_store_id(config.url, self.stored_fingerprint) if shares else "",
            blocks_max=capacity_blocks or _PLACES_DEFAULT,
            is_sized=capacity_blocks is not None if store is not None else not shares,
            latency_s=config.latency_s,
            block_load_s=self.block_bytes / config.bytes_per_s,
            when=config.when,
            loss="" if self.packing is None else self.packing.loss,
        )


def _packing_of(config: TierConfig, layout: KVLayout) -> Packing | None:
    return None if config.format in ("exact", layout.dtype) else Packing(layout, config.format, config.exact_layers)


def _open_in_time(opens: _TierOpener, wait_s: float) -> OpenTier | UnopenedTier:
    """Open a store in a thread of its own, and return the tier as it is after `wait_s`."""
    opening: Future[OpenTier] = Future()

    def run() -> None:
        try:
            opening.set_result(opens())
        except (BatonError, OSError) as error:
            opening.set_exception(error)
        finally:
            if not opening.done():
                opening.set_exception(RuntimeError(f"a bug in Baton has ended the opening of tier {opens.name}"))

    threading.Thread(target=run, name=f"{opens.name}-opens", daemon=True).start()
    try:
        return opening.result(wait_s)
    except FutureTimeoutError:
        problem = f"the store of tier {opens.name} is not open after {wait_s:g} s"
        return UnopenedTier(opens.rules(), problem, _SlowOpening(opens, opening))


@dataclass(slots=True)
class _SlowOpening:
    """Waits for the opening of a store that is under way. After its failure, opens the store again."""

    opens: _TierOpener
    under_way: Future[OpenTier] | None

    def __call__(self) -> OpenTier:
        under_way, self.under_way = self.under_way, None
        return self.opens() if under_way is None else under_way.result()


def _close(found: Sequence[OpenTier | UnopenedTier]) -> None:
    for tier in found:
        if isinstance(tier, OpenTier):
            tier.store.close()


def _store_id(url: str, fingerprint: str) -> str:
    """Return an id of a shared store. It is equal for hosts that can read each other's blocks, and hides the URL."""
    return blake2b(f"{fingerprint} {url}".encode(), digest_size=16).hexdigest()


def fingerprint_of(identity: KVIdentity, layout: KVLayout, precision: str) -> str:
    """Return a digest of everything that a block's bytes depend on, except its tokens."""
    parts = (msgspec.structs.replace(identity, model=""), layout, precision)
    return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
