"""Create the spill space of the server's own host from its configuration."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from baton.compute.models.card import ModelCard
from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.decide.kv.spill import SpillRules, hot_blocks, spill_rules
from baton.move.arena.spill import create_spill
from baton.move.memory_limits import memory_free_bytes
from baton.serve.host.build import Computing, HostParts


def add_spill(own: HostParts, config: Config, card: ModelCard, computing: Computing) -> tuple[HostParts, SpillRules]:
    """Return the host with the spill space of `kv.spill`, and its rules. Raises ConfigError or ArenaError."""
    spill, layout = config.kv.spill, computing.layout
    rules = spill_rules(
        blocks=max(1, spill.bytes // layout.block_bytes),
        block_tokens=layout.block_tokens,
        token_bytes=layout.token_bytes,
        bytes_per_s=spill.bytes_per_s,
        tokens_per_s_min=spill.tokens_per_s_min,
    )
    problems = _conflicts(config, card, computing) + _size_problems(own, config, computing, rules)
    if problems:
        raise ConfigError("\n".join(problems))
    descriptor = create_spill(spill.folder, rules.blocks * layout.block_bytes)
    setups = [msgspec.structs.replace(setup, spill_blocks=rules.blocks) for setup in own.setups]
    return replace(own, setups=setups, spill_fd=descriptor), rules


def _conflicts(config: Config, card: ModelCard, computing: Computing) -> list[str]:
    found: list[str] = []
    if computing.device.drivers:
        found.append(f"kv.spill needs CPU workers, and the device is {computing.device.name}; use --device cpu")
    if computing.layout.ranks > 1:
        found.append(
            f"kv.spill needs workers of one process, not {computing.layout.ranks} ranks: leave out --tp, --pp and --dp"
        )
    if card.window_tokens is not None:
        found.append(f"every layer of {card.name} has an attention window, so any length fits: leave out kv.spill")
    if config.hosts.expected:
        found.append(
            f"kv.spill works on the server's own host only, and {config.hosts.expected} hosts are to join: leave out "
            "kv.spill or the hosts"
        )
    if config.attention_backend not in ("auto", "native", "sdpa"):
        found.append(f"kv.spill needs --attention-backend native or sdpa, not {config.attention_backend}")
    return found


def _size_problems(own: HostParts, config: Config, computing: Computing, rules: SpillRules) -> list[str]:
    """Return the conflicts of sizes. A spill space must not lower the longest request that the arena alone holds."""
    spill, layout, arena_blocks = config.kv.spill, computing.layout, own.blocks_total
    arena_tokens, least_blocks = arena_blocks * layout.block_tokens, arena_blocks - hot_blocks(arena_blocks)
    found: list[str] = []
    if rules.blocks < max(1, least_blocks) or spill.bytes < layout.block_bytes:
        found.append(
            f"kv.spill.bytes is {spill.bytes}, but an arena of {arena_blocks} blocks needs at least "
            f"{max(1, least_blocks) * layout.block_bytes}; raise it, or lower kv.bytes"
        )
    if rules.tokens_max < arena_tokens:
        found.append(
            f"kv.spill: at {spill.bytes_per_s:g} bytes/s, {spill.tokens_per_s_min:g} tokens/s allow requests of "
            f"{rules.tokens_max} tokens, but the arena holds {arena_tokens}; lower kv.spill.tokens_per_s_min"
        )
    free_bytes = memory_free_bytes() - own.arena.bytes_total
    if not spill.folder and spill.bytes > free_bytes:
        found.append(
            f"kv.spill.bytes is {spill.bytes}, but the arena leaves {max(0, free_bytes)} bytes of memory; lower it, or "
            "set kv.spill.folder"
        )
    return found
