"""Build the parts of the models of a server, each on its own part of the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from baton.compute.models.resolve import resolve_model
from baton.core.config import Config
from baton.core.errors import BatonError, ConfigError
from baton.core.model_tables import config_of, model_configs
from baton.core.served_model import ServedModelConfig
from baton.move.cores import own_cores
from baton.serve.host.sizing import HostShare, divide_cores, neighbour_cores
from baton.serve.live.assembly import Parts, assemble
from baton.serve.messages.setup import WorkerSetup

_NAME_CHARS_MAX = 128


def assemble_models(server: Config) -> list[Parts]:
    """Build the parts of every model of a configuration; start no process. Raises BatonError."""
    if not server.models:
        return [assemble(server, resolve_model(server.model, server.load_format, server.adapter))]
    configs = model_configs(server)
    cores = divide_cores([config.cores for config in configs], own_cores())
    made: list[Parts] = []
    try:
        for config, mine in zip(configs, cores, strict=True):
            made.append(_assemble_beside(config, mine, made, server.served_aliases))
    except BatonError:
        for parts in made:
            _release(parts)
        raise
    _lend_cores([parts.own.setups for parts in made if parts.own is not None and parts.config.idle_cores == "lend"])
    return made


def assemble_table(server: Config, table: ServedModelConfig, others: Sequence[Parts]) -> Parts:
    """Build the parts of one more model, beside those that run. Raises BatonError."""
    config = config_of(msgspec.structs.replace(server, tiers=()), table)
    taken = {core for parts in others for core in parts.computing.share.cores}
    free = [core for core in own_cores() if core not in taken]
    if config.cores > len(free):
        raise ConfigError(
            f"the model wants {config.cores} cores, but {len(free)} of {len(own_cores())} are free: unload a model, or "
            "leave `cores` out to share those of the others"
        )
    return _assemble_beside(config, tuple(free[: config.cores or None] or own_cores()), others, server.served_aliases)


def _assemble_beside(config: Config, cores: tuple[int, ...], others: Sequence[Parts], aliases: Sequence[str]) -> Parts:
    """Build the parts of one of several models. `aliases`: further names of the first one."""
    card = resolve_model(config.model, config.load_format, config.adapter)
    name = config.served_name or card.name
    if name in {*aliases, *(parts.card.name for parts in others)}:
        raise ConfigError(f"two models are named {name!r}: give each a `name` of its own")
    if not name.isprintable() or len(name) > _NAME_CHARS_MAX:
        raise ConfigError(f"{name[:_NAME_CHARS_MAX]!r} is no name: give 1 to {_NAME_CHARS_MAX} printable characters")
    arenas = [parts.own.arena for parts in others if parts.own is not None]
    share = HostShare(cores=cores, pledged_bytes=sum(arena.untouched_bytes for arena in arenas))
    named = msgspec.structs.replace(config, log=_of_model(config.log, name), step_log=_of_model(config.step_log, name))
    return assemble(named, card, share)


def _lend_cores(models: Sequence[list[WorkerSetup]]) -> None:
    """Let each worker borrow the cores of the next one, across models, while their owner sleeps."""
    workers = [setup for setups in models for setup in setups]
    lent = iter(neighbour_cores([(setup.threads, setup.cores) for setup in workers]))
    for setups in models:
        setups[:] = [_with_guests(setup, next(lent)) for setup in setups]


def _with_guests(setup: WorkerSetup, cores: tuple[int, ...]) -> WorkerSetup:
    is_own = not set(cores).isdisjoint(setup.cores)  # more models than cores: some share one
    return msgspec.structs.replace(setup, guest_cores=() if is_own else cores)


def _of_model(path: str, name: str) -> str:
    """Return the path of one model's log: `run.log` becomes `run.NAME.log`. Empty stays empty."""
    if not path:
        return ""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.{quote(name, safe='')}{whole.suffix}"))


def _release(parts: Parts) -> None:
    if parts.driver.log is not None:
        parts.driver.log.close()
    if parts.own is not None:
        parts.own.arena.close()
