"""Tables of the KV blocks of joined hosts. A server that ends saves them, and the next one uses the arenas again."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.config import SurvivalConfig
from baton.core.files import make_private_folder, open_private
from baton.core.prefixes import SealedBlock
from baton.decide.kv.host_pool import HostPool
from baton.move.clock import unix_s

KEPT_BLOCKS_MAX = 2**18
"""Maximum blocks in a table. Reading such a table takes 0.2 s, in which a server that has just started does nothing."""
_ID = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".arena"

log = logging.getLogger("baton.server")


class ArenaTable(Struct, frozen=True, kw_only=True):
    """The sealed blocks of an arena."""

    blocks_total: int
    blocks: tuple[SealedBlock, ...]


class KeptArenas:
    """The tables in `survival.resume_folder`, one per arena. Each is used once, within `survival.resume_s`."""

    def __init__(self, config: SurvivalConfig) -> None:
        self._folder = Path(config.resume_folder) if config.resume_folder else None
        self._keep_s = config.resume_s

    def table(self, pool: HostPool) -> ArenaTable | None:
        """Return the table of a host's blocks. None: it has no sealed blocks, or no folder is configured."""
        blocks = pool.hot_prefixes.sealed(KEPT_BLOCKS_MAX) if self._folder is not None else ()
        return ArenaTable(blocks_total=pool.view().blocks_total, blocks=tuple(blocks)) if blocks else None

    def save(self, tables: Mapping[str, ArenaTable]) -> None:
        """Save tables by the ids of their arenas. If that fails, the KV will be dropped; the reason is logged."""
        for arena_id, table in tables.items():
            if self._folder is None:
                continue
            try:
                make_private_folder(self._folder)
                self._delete_expired(self._folder)
                with open_private(self._folder / f"{arena_id}{_SUFFIX}", "wb") as file:
                    file.write(msgspec.msgpack.encode(table))
            except OSError as error:
                log.warning("the KV of a host will be dropped: %s cannot be written: %s", self._folder, error)

    def take(self, arena_id: str, blocks_total: int) -> tuple[SealedBlock, ...]:
        """Return the sealed blocks of an arena of this size, and delete their table. Empty if there is none."""
        if self._folder is None or _ID.fullmatch(arena_id) is None:
            return ()
        try:
            self._delete_expired(self._folder)
            file = self._folder / f"{arena_id}{_SUFFIX}"
            content = file.read_bytes()
            file.unlink()
            table = msgspec.msgpack.decode(content, type=ArenaTable)
        except (OSError, msgspec.DecodeError):
            return ()
        return table.blocks if table.blocks_total == blocks_total else ()

    def _delete_expired(self, folder: Path) -> None:
        for file in folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                if file.stat().st_mtime + self._keep_s < unix_s():
                    file.unlink()
