"""Who in a step guesses ahead, and how far."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.config import BatchLimits, SpeculationConfig
from baton.decide.control.drafts import Drafter
from baton.decide.control.lane import Lane


def drafts_for(
    lanes: Sequence[Lane], chosen: Sequence[tuple[int, int]], limits: BatchLimits, config: SpeculationConfig
) -> dict[int, list[int]]:
    """Guess on for those of a step that decode, as far as the step and their blocks have room. Returns by index.

    `chosen`: (index of the lane, tokens of it). With more than `config.requests_max` of them decoding, none is guessed.
    """
    if config.tokens_max == 0:
        return {}
    decoding = [index for index, count in chosen if count == 1 == lanes[index].remaining_tokens]
    if len(decoding) > config.requests_max:
        return {}
    spare_tokens = limits.step_tokens_max - sum(count for _, count in chosen)
    drafts: dict[int, list[int]] = {}
    for index in decoding:
        lane = lanes[index]
        most = min(spare_tokens, lane.room_tokens - 1, lane.tokens_max - len(lane.tokens) - 1)
        if lane.until == "end" and most > 0:
            lane.drafter = lane.drafter or Drafter(config)
            drafts[index] = lane.drafter.guess(lane.tokens, most, lane.request.sampling.stop_token_ids)
            spare_tokens -= len(drafts[index])
    return drafts
