"""Decoding requests beyond the places of a batch take turns: no stream stands still until another one ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from baton.core.config import BatchLimits
from baton.core.messages import BlocksGranted, BlocksWanted, PreemptRequest, StartRequest
from baton.core.step import SliceResult, Step, StepResult
from baton.core.types import BlockId, Request, RequestId, pack_tokens
from baton.decide.control.decode_run import DecodeRun
from tests.property.little_cluster import new_batcher
from tests.unit.decide.control.test_batcher_prompts import W, in_step

PLACES, BLOCKS = 4, 100
PROMPT_TOKENS = 6


class Decoder:
    """A decode worker without a pool: each request comes with all of its blocks."""

    def __init__(self) -> None:
        self.batcher = new_batcher(W, BatchLimits(step_tokens_max=64, requests_max=PLACES))
        self.number = 0

    def hand_off(self, name: str, *, client: int = 0) -> None:
        request = Request(
            id=RequestId(name), prompt_tokens=PROMPT_TOKENS, output_tokens_max=200, arrived_at_s=0.0, client=client
        )
        tokens = pack_tokens([*range(PROMPT_TOKENS), 7])
        self.batcher.apply([StartRequest(request, 1, tokens, "end", self.table(), PROMPT_TOKENS)])

    def table(self) -> tuple[BlockId, ...]:
        self.number += 1
        return tuple(BlockId(self.number * BLOCKS + index) for index in range(BLOCKS))

    def step(self) -> list[str]:
        """Run a step. Return its requests."""
        step = self.batcher.plan(0.0)
        self.commit(step)
        return in_step(step)

    def commit(self, step: Step) -> None:
        self.batcher.commit(step, StepResult([SliceResult(token=7) for _ in step.slices]))

    def wanted(self) -> Sequence[BlocksWanted]:
        report = self.batcher.take_report(now_s=0.0)
        return [] if report is None else [event for event in report.events if isinstance(event, BlocksWanted)]


def test_a_stream_beyond_the_places_continues_in_the_next_step() -> None:
    """The newest of `PLACES` + 1 requests is never left out twice in a row, nor is any other."""
    decoder = Decoder()
    names = [str(index) for index in range(PLACES)]
    for name in names:
        decoder.hand_off(name)
    decoder.step()
    decoder.hand_off("new")
    steps = [decoder.step() for _ in range(20)]
    assert "new" in steps[0]
    for before, after in itertools.pairwise(steps):
        assert {*before, *after} == {*names, "new"}


def test_streams_of_another_client_are_in_each_step() -> None:
    decoder = Decoder()
    for index in range(3 * PLACES):
        decoder.hand_off(str(index), client=1)
    decoder.hand_off("alone", client=2)
    assert all("alone" in decoder.step() for _ in range(20))


def test_a_preempted_stream_gets_blocks_while_the_batch_is_full() -> None:
    """It has sent text already, so it takes turns with the others."""
    decoder = Decoder()
    for index in range(PLACES + 2):
        decoder.hand_off(str(index))
    decoder.step()
    decoder.batcher.apply([PreemptRequest(RequestId("0"), 1)])
    decoder.step()
    assert [event.request_id for event in decoder.wanted()] == ["0"]
    decoder.batcher.apply([BlocksGranted(RequestId("0"), 1, decoder.table(), 0)])
    assert any("0" in decoder.step() for _ in range(3))


def test_the_simulator_plays_turns_step_by_step() -> None:
    """A run repeats one batch, so there is none while requests take turns."""
    decoder = Decoder()
    for index in range(PLACES):
        decoder.hand_off(str(index))
    decoder.step()
    run = decoder.batcher.plan_run(0.0)
    assert isinstance(run, DecodeRun)
    decoder.hand_off("new")
    step = decoder.batcher.plan_run(0.0)
    assert isinstance(step, Step)
    assert "new" in in_step(step)
