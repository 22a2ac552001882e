"""Opens the stores below an arena, as the configuration names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from baton.compute.models.dtype import Dtype
from baton.core.config import TierConfig
from baton.core.errors import ConfigError, StoreError
from baton.core.files import placed
from baton.decide.kv.identity import KVIdentity
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules
from baton.move.store.opening import open_store, parse_store_url
from baton.move.store.port import Store

_PLACES_DEFAULT = 1_000_000
"""Blocks that are remembered of a store whose other side decides how many it keeps."""


@dataclass(slots=True)
class OpenTier:
    """A tier with its store."""

    rules: TierRules
    store: Store
    list_s: float = 0.0
    """How often it is asked what it has. 0: once."""

    @property
    def name(self) -> str:
        return self.rules.name


@dataclass(frozen=True, slots=True)
class UnopenedTier:
    """A tier whose store could not be used when it was opened."""

    rules: TierRules
    """As far as they are known without it: room for as many blocks as are remembered at most."""
    problem: str
    open: Callable[[], OpenTier]
    """Tries again. Raises StoreError where it still cannot be used, or ConfigError."""


def is_shared(url: str) -> bool:
    """The store is one of all hosts, not of the machine that opens it."""
    return url.partition(":")[0] not in ("file", "memory")


def check_tiers(configs: Sequence[TierConfig]) -> None:
    """Look at every URL without opening anything. Raises ConfigError with all that is wrong with any of them."""
    problems: list[str] = []
    for number, config in enumerate(configs):
        try:
            parse_store_url(config.url)
        except ConfigError as error:
            problems += placed(f"tiers[{number}]", error)
    if problems:
        raise ConfigError("\n".join(problems))


def open_tiers(configs: Sequence[TierConfig], *, layout: KVLayout, fingerprint: str) -> list[OpenTier]:
    """Open the stores, for blocks of this model in this layout alone. See `fingerprint_of`.

    Raises ConfigError with what is wrong with any URL, or which stores cannot be used; none is open then.
    """
    found = open_usable_tiers(configs, layout=layout, fingerprint=fingerprint)
    problems = [tier.problem for tier in found if isinstance(tier, UnopenedTier)]
    if problems:
        _close(found)
        raise ConfigError("\n".join(problems))
    return [tier for tier in found if isinstance(tier, OpenTier)]


def open_usable_tiers(
    configs: Sequence[TierConfig], *, layout: KVLayout, fingerprint: str
) -> list[OpenTier | UnopenedTier]:
    """Open the stores that can be used now, and say of each other one why it cannot. Names do not depend on that.

    Raises ConfigError with what is wrong with any URL, whatever state its store is in; none is open then.
    """
    check_tiers(configs)
    found: list[OpenTier | UnopenedTier] = []
    kinds: set[str] = set()
    for number, config in enumerate(configs):
        kind = config.url.partition(":")[0]
        name = kind if kind not in kinds else f"{kind}-{number}"
        kinds.add(kind)
        opens = _Opening(name, config, layout, fingerprint)
        try:
            found.append(opens())
        except StoreError as error:
            found.append(UnopenedTier(opens.rules(), f"tiers[{number}]: {error}", opens))
        except ConfigError as error:
            _close(found)
            raise ConfigError("\n".join(placed(f"tiers[{number}]", error))) from error
    return found


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens one tier's store, as often as it is asked to."""

    name: str
    config: TierConfig
    layout: KVLayout
    fingerprint: str

    def __call__(self) -> OpenTier:
        config = self.config
        store = open_store(config.url, layout_fingerprint=self.fingerprint, block_bytes=self.layout.block_bytes)
        return OpenTier(self.rules(store), store, config.list_s if is_shared(config.url) else 0.0)

    def rules(self, store: Store | None = None) -> TierRules:
        """Say what is known of the tier. Without its store: a machine's own has a size, that of others is not told."""
        config, shares = self.config, is_shared(self.config.url)
        capacity_blocks = store.capacity_blocks if store is not None else None
        return TierRules(
            name=self.name,
            shared_as=_store_id(config.url, self.fingerprint) if shares else "",
            blocks_max=capacity_blocks or _PLACES_DEFAULT,
            is_sized=capacity_blocks is not None if store is not None else not shares,
            latency_s=config.latency_s,
            block_load_s=self.layout.block_bytes / config.bytes_per_s,
            when=config.when,
        )


def _close(found: Sequence[OpenTier | UnopenedTier]) -> None:
    for tier in found:
        if isinstance(tier, OpenTier):
            tier.store.close()


def _store_id(url: str, fingerprint: str) -> str:
    """Name a store, and the blocks in it that hosts of this model and layout can read. Tells nobody the URL."""
    return blake2b(f"{fingerprint} {url}".encode(), digest_size=16).hexdigest()


def fingerprint_of(identity: KVIdentity, layout: KVLayout, dtype: Dtype) -> str:
    """Name everything that bytes of a block depend on, but its tokens."""
    parts = (msgspec.structs.replace(identity, model=""), layout, dtype)
    return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
