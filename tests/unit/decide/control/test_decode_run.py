"""How long a batch may be taken to decode alike."""

from __future__ import annotations

from array import array

from baton.core.types import BlockId, Request, RequestId
from baton.decide.control.decode_run import plan_decode_run
from baton.decide.control.lane import Lane

PROMPT_TOKENS, BLOCK_TOKENS = 6, 4


def lane(*, blocks: int = 10, output: int = 1, attempt: int = 1, most: int = 100, shares: bool = True) -> Lane:
    """A lane that has written `output` tokens, all but the last of them computed."""
    request = Request(
        id=RequestId("a"),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens_max=most,
        arrived_at_s=0.0,
        shares_blocks=shares,
    )
    made = Lane(
        request=request,
        attempt=attempt,
        tokens=array("I", [5] * (PROMPT_TOKENS + output)),
        until="end",
        block_tokens=BLOCK_TOKENS,
        key=(),
    )
    made.hold([BlockId(index) for index in range(blocks)], PROMPT_TOKENS + output - 1)
    return made


def test_a_run_reads_what_its_lanes_hold_and_ends_with_the_first_that_may_end() -> None:
    run = plan_decode_run([lane(output=3), lane(output=1, most=21)])
    assert run is not None
    assert (run.steps, run.context_tokens) == (20, 9 + 7)


def test_room_and_questions_are_those_of_the_shortest_table() -> None:
    """7 tokens in 3 blocks: room for 6 more steps; asked for when 4 tokens of room are left, so after 2 of them."""
    run = plan_decode_run([lane(), lane(blocks=3)])
    assert run is not None
    assert (run.room_steps, run.asks_after) == (12 - 6, 12 - 4 + 1 - 7)


def test_the_last_token_of_a_prompt_is_not_decoded() -> None:
    """What comes of it is a first token, which others wait for."""
    assert plan_decode_run([lane(), lane(output=0)]) is None


def test_a_second_attempt_is_booked_block_by_block() -> None:
    """Its first one may have left blocks of the same names; where nothing is named, there is none."""
    run = plan_decode_run([lane(), lane(attempt=2)])
    assert run is not None
    assert run.steps == 8 - 6
    unnamed = plan_decode_run([lane(shares=False), lane(attempt=2, shares=False)])
    assert unnamed is not None
    assert unnamed.steps == 99
