"""What an engine adds to its kernels: a factor and an overhead per step, measured, named and versioned."""

from __future__ import annotations

from functools import cache

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.validation import Factor, Number, Price, Seconds, did_you_mean
from baton.decide.cost.catalog import data_text, hardware, models
from baton.decide.cost.hardware import Hardware


class Phase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step takes `factor` times its kernels, and `overhead_s` more."""

    factor: Factor
    overhead_s: Seconds = 0.0


class EngineProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, as measured with one model on one kind of GPU; or a generic one."""

    name: str
    version: str
    llm: str = ""
    """Empty: of any model."""
    hardware: str = ""
    tp: Number = 0
    prompt: Phase
    prompt_large: Phase | None = None
    """Of steps with more than `large_tokens`, where the measurements jump."""
    large_tokens: Number = 2048
    decode: Phase
    request_s: Price = 0.0
    """Each decoding request adds this."""
    layer_s: Price = 0.0
    """Each layer adds this to every step."""
    prompt_layer_s: Price = 0.0
    """A step with prompt tokens takes at least this per layer where the host launches kernels one by one."""
    graph_tokens: Number = 0
    """Steps of up to so many tokens are replayed as CUDA graphs, so that the host does not launch anything."""
    note: str = ""
    """What it was borrowed from, where no profile fits exactly."""

    def prompt_phase(self, tokens: int) -> Phase:
        """What holds for a step with this many prompt tokens."""
        if self.prompt_large is not None and tokens > self.large_tokens:
            return self.prompt_large
        return self.prompt


@cache
def profiles() -> tuple[EngineProfile, ...]:
    """All that are known."""
    return tuple(msgspec.json.decode(data_text("engines.json"), type=list[EngineProfile]))


def engine_profile(name: str, *, llm: str, gpu: Hardware, tp: int) -> EngineProfile:
    """Find an engine's profile; without one for this model, GPU and tp, the nearest, which says so in its `note`.

    Near means: same kind of kernels first, then the same tp, then a model of similar size. Raises ConfigError.
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
