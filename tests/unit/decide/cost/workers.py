"""Workers that cost tests ask about."""

from __future__ import annotations

from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.catalog import hardware, model_shape
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.parallel import Parallel, Precision
from baton.decide.cost.roofline import RooflineCost


def worker(llm: str, gpu: str, parallel: Parallel, engine: str, precision: Precision | None = None) -> RooflineCost:
    """One worker under the roofline."""
    model, found = model_shape(llm), hardware(gpu)
    profile = engine_profile(engine, llm=model.name, gpu=found, tp=parallel.tp)
    return RooflineCost(
        model=model, hardware=found, parallel=parallel, engine=profile, precision=precision or Precision()
    )


def prompts(tokens: int, *, count: int = 1, cached: int = 0) -> StepShape:
    """A step that computes whole prompts."""
    pairs = count * prefill_pairs(tokens, cached)
    return StepShape(prefill_tokens=tokens * count, prefill_chunks=count, prefill_pairs=pairs)


def decoding(requests: int, *, context: int) -> StepShape:
    """A step of requests that each read as much context."""
    return StepShape(decode_requests=requests, context_tokens=requests * context)
