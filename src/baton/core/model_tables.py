"""Merge the tables of several models with the settings of their server."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.served_model import MODELS_MAX, ServedModelConfig
from baton.core.validation import out_of_range, type_problems, valid_part

_ROLES = ("prefill", "decode", "mixed")
_SECTIONS = ("parallel", "kv", "batch", "speculation", "slo")


def config_of(server: Config, table: ServedModelConfig) -> Config:
    """Return the configuration of one model: its table over the server's. Raises ConfigError with every problem."""
    raw: dict[str, Any] = msgspec.to_builtins(server)
    given = {key: value for key, value in structs.asdict(table).items() if value is not None}
    name, roles = given.pop("name"), {role: given.pop(role) for role in _ROLES}
    sections = {key: raw[key] | given.pop(key) for key in _SECTIONS}
    raw |= {**given, **sections, "served_name": name, "models": [], "cost": table.cost, "tiers": list(table.tiers)}
    if any(roles.values()):
        raw["topology"] = roles
    problems = out_of_range(table) + type_problems(raw, Config)
    config = msgspec.convert(valid_part(raw, Config), Config)
    problems += config.problems() + config.lacks()
    if problems:
        raise ConfigError("\n".join(f"model {name or table.model}: {problem}" for problem in problems))
    return config


def model_configs(server: Config) -> list[Config]:
    """Return the configuration of every model of a server. Raises ConfigError with every problem."""
    if not server.models:
        return [server]
    problems = table_problems(server)
    configs: list[Config] = []
    for table in server.models:
        try:
            configs.append(config_of(server, table))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return configs


def table_problems(server: Config) -> list[str]:
    """Return the settings at the top of the file that a server of several models cannot have."""
    found: list[str] = []
    if (count := len(server.models)) > MODELS_MAX:
        found.append(f"there are {count} models, at most {MODELS_MAX} are allowed: remove {count - MODELS_MAX}")
    plain = Config()
    if server.model != plain.model or server.served_name or server.adapter:
        found.append("models names every model: move `model`, `served_name` and `adapter` into a table [[models]]")
    if server.tiers:
        found.append("tiers hold the KV of one model: move them into the tables [[models]], each with its own URL")
    if server.hosts.expected or server.engines.servers or server.engines.start != "baton":
        found.append("several models have only Baton's own workers: leave out hosts.expected and engines")
    return found
