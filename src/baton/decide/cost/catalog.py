"""Catalogue of models and GPUs. The figures are in `data/`, their sources in the README there."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from baton.core.errors import ConfigError
from baton.core.validation import did_you_mean
from baton.decide.cost.hardware import Hardware, Kernels, Links
from baton.decide.cost.model import ModelShape

_MODEL_ALIASES = {
    "llama-2": "llama2", "llama-3.1": "llama3.1", "llama-3": "llama3.1", "llama3-": "llama3.1-", "meta-llama": "llama",
    "-instruct": "", "-hf": "", "-chat": "", "-base": "",
}  # fmt: skip
_NUMBERS = (
    "bf16_flops", "fp8_flops", "int8_flops", "memory_bytes_per_s", "memory_bytes", "gpu_w", "inter_node_bytes_per_s",
    "intra_node_bytes_per_s", "p2p_latency_s", "usd_per_hour", "node_w",
)  # fmt: skip


def data_text(name: str) -> str:
    """Return the text of a data file of this package."""
    return resources.files("baton.decide.cost").joinpath("data", name).read_text(encoding="utf-8")


@cache
def models() -> dict[str, ModelShape]:
    """Return every model of the catalogue by name."""
    return {shape.name: shape for shape in msgspec.json.decode(data_text("models.json"), type=list[ModelShape])}


@cache
def hub_names() -> dict[str, str]:
    """Return the Hugging Face hub name of each model of the catalogue."""
    return msgspec.json.decode(data_text("hub.json"), type=dict[str, str])


def hub_name(name: str) -> str | None:
    """Return the hub name of a model of the catalogue, or None."""
    return hub_names().get(name)


def model_shape(name: str) -> ModelShape:
    """Return a model by its name or its hub name. Raise ConfigError with the nearest known one."""
    known = models()
    plain = name.lower().rpartition("/")[2]
    for written, ours in _MODEL_ALIASES.items():
        plain = plain.replace(written, ours)
    found = known.get(plain) or known.get(name.lower())
    if found is None:
        hint = did_you_mean(plain, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"unknown model {name!r}{hint}; or give its config.json")
    return found


@cache
def all_hardware() -> dict[str, Hardware]:
    """Return every GPU of the catalogue by name."""
    kernels = {item.name: item for item in msgspec.json.decode(data_text("kernels.json"), type=list[Kernels])}
    links = {item.name: item for item in msgspec.json.decode(data_text("links.json"), type=list[Links])}
    rows = csv.DictReader(data_text("hardware.csv").splitlines())
    return {row["name"]: _hardware(row, kernels, links) for row in rows}


def _hardware(row: dict[str, str], kernels: dict[str, Kernels], links: dict[str, Links]) -> Hardware:
    fields: dict[str, Any] = {name: float(row[name]) for name in _NUMBERS if row[name]}
    own = row["aliases"].split()[0].partition("_")[0] == row["kernels"] == row["links"]
    note = "" if own else f"kernel efficiencies of {row['kernels']}, all-reduce of {row['links']}, scaled to its peaks"
    return Hardware(
        name=row["name"],
        kernels=kernels[row["kernels"]],
        links=links[row["links"]],
        gpus_per_node=int(row["gpus_per_node"]),
        note=note,
        **fields,
    )


@cache
def _hardware_names() -> dict[str, str]:
    names: dict[str, str] = {}
    for row in csv.DictReader(data_text("hardware.csv").splitlines()):
        for name in (row["name"], *row["aliases"].split()):
            names[_plain(name)] = row["name"]
    return names


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def is_known(name: str) -> bool:
    """Return whether the catalogue has a GPU of this name."""
    return _plain(name) in _hardware_names()


def hardware(name: str) -> Hardware:
    """Return a GPU by any of its usual names. Raise ConfigError with the nearest known one."""
    found = _hardware_names().get(_plain(name))
    if found is None:
        known = all_hardware()
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"unknown hardware {name!r}{hint}; or describe it (docs/simulator.md, a GPU of your own)")
    return all_hardware()[found]
