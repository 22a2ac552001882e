"""What several scripts of this folder play: vLLM and Orca as they began, clusters whose steps cost something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.config import BatchLimits, Plugin
from baton.core.ports import CostModel
from baton.decide.policy.batching import Candidate
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.sim.spec import ClusterSpec

PROMPTS_FIRST = replace(POLICY_SETS["sarathi"], batching=Plugin(use="prefill-first"))
"""vLLM of 2023: every engine computes prompts and answers, and prompts go before decodes."""
WHOLE_PROMPTS = Plugin(use=f"{__name__}:WholePrompts")


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Every decoding request its token, and prompts while they fit whole into the step; one alone where none fits.

    A prompt is never cut, and one that is longer than a step is a step. Source: Orca (OSDI 2022), section 4.1; the
    machines of Splitwise's artefact do the same.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> list[tuple[int, int]]:
        """See `BatchingPolicy.select`."""
        decodes = [place for place, one in enumerate(candidates) if one.remaining_tokens == 1 and one.room_tokens > 0]
        chosen = [(place, 1) for place in decodes[: limits.requests_max]]
        left = limits.step_tokens_max
        for place, one in enumerate(candidates):
            if len(chosen) >= limits.requests_max:
                break
            if one.remaining_tokens == 1 or one.room_tokens < one.remaining_tokens:
                continue
            if one.remaining_tokens > left and left < limits.step_tokens_max:
                break
            chosen.append((place, one.remaining_tokens))
            left -= one.remaining_tokens
        return chosen


def with_cost(spec: ClusterSpec, changes: Mapping[str, object]) -> ClusterSpec:
    """Price every kind's steps by its own cost with these keys changed, such as `engine` or `tp`."""
    kinds = {name: replace(kind, cost={**kind.cost, **changes}) for name, kind in spec.kinds.items()}
    return replace(spec, kinds=kinds)
