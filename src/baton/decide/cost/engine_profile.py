"""Measured overhead of engines: a factor and a fixed time per step, by name and version."""

from __future__ import annotations

from functools import cache

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.validation import Factor, Number, Price, Seconds, did_you_mean
from baton.decide.cost.catalog import data_text, hardware, models
from baton.decide.cost.hardware import Hardware


class Phase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step takes `factor` times the time of its kernels, plus `overhead_s`."""

    factor: Factor
    overhead_s: Seconds = 0.0


class EngineProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, measured with one model on one kind of GPU, or a generic profile."""

    name: str
    version: str
    llm: str = ""
    """Empty: any model."""
    hardware: str = ""
    tp: Number = 0
    prompt: Phase
    prompt_large: Phase | None = None
    """For steps with more than `large_tokens` tokens, where the measurements jump."""
    large_tokens: Number = 2048
    decode: Phase
    request_s: Price = 0.0
    """Seconds per decoding request."""
    layer_s: Price = 0.0
    """Seconds per layer and step."""
    prompt_layer_s: Price = 0.0
    """Minimum seconds per layer of a step with prompt tokens, if the host launches kernels one by one."""
    graph_tokens: Number = 0
    """Steps of up to this many tokens run as CUDA graphs, without kernel launches by the host."""
    note: str = ""
    """The measured profile that this one was taken from, if none matches exactly."""

    def prompt_phase(self, tokens: int) -> Phase:
        """Return the factor and overhead of a step with this many prompt tokens."""
        if self.prompt_large is not None and tokens > self.large_tokens:
            return self.prompt_large
        return self.prompt


@cache
def profiles() -> tuple[EngineProfile, ...]:
    """Return all known profiles."""
    return tuple(msgspec.json.decode(data_text("engines.json"), type=list[EngineProfile]))


def engine_profile(name: str, *, llm: str, gpu: Hardware, tp: int) -> EngineProfile:
    """Return an engine's profile for this model, GPU and tp, or the nearest one with a `note` about it.

    Nearest: the same kernels first, then the same tp, then a model of similar size. Raise ConfigError for an unknown
    engine.
    """
    named = [profile for profile in profiles() if profile.name == name]
    if not named:
        known = sorted({profile.name for profile in profiles()})
        raise ConfigError(f"unknown engine {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    best = min(named, key=lambda profile: _distance(profile, llm, gpu, tp))
    if best.llm == "" or (best.llm, best.hardware, best.tp) == (llm, gpu.name, tp):
        return best
    note = (
        f"engine {name}: no profile of {llm} on {gpu.name} tp {tp}; that of {best.llm} on {best.hardware} tp {best.tp}"
    )
    return msgspec.structs.replace(best, note=note)


def _distance(profile: EngineProfile, llm: str, gpu: Hardware, tp: int) -> tuple[bool, float, float]:
    if profile.llm == "":
        return (False, 0.0, 0.0)
    size, wanted = (
        models()[profile.llm].params,
        models()[llm].params if llm in models() else models()[profile.llm].params,
    )
    other_kernels = hardware(profile.hardware).kernels.name != gpu.kernels.name
    return (other_kernels, abs(profile.tp - tp) / max(profile.tp, tp), max(size, wanted) / min(size, wanted))
