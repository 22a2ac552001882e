"""A step that ends a prompt tells how far it is while it runs: from the engine's word, and never too early."""

from __future__ import annotations

import queue

import pytest

from baton.compute.step_engine import Progress
from baton.core.copies import LayersDone
from baton.core.step import LayerStream, Slice, Step
from baton.core.types import BlockId, RequestId, Sampling, WorkerId
from baton.serve.worker.layers import LayerWatch

LAYERS = 7
WAIT_S = 30.0
"""For a message that is certain to come."""


def step_of(*, groups: int, attempt: int = 1) -> Step:
    part = Slice(
        request_id=RequestId("r"),
        tokens=[5, 6, 7],
        start=0,
        count=3,
        block_table=[BlockId(0)],
        sample=True,
        sampling=Sampling(),
        prompt_tokens=3,
        stream=LayerStream(attempt, groups),
    )
    return Step((part,))


@pytest.fixture
def told() -> queue.Queue[LayersDone]:
    return queue.Queue()


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def watch(told: queue.Queue[LayersDone], progress: Progress) -> LayerWatch:
    return LayerWatch(WorkerId("w"), progress, LAYERS, tell=told.put)


def test_layers_are_told_group_by_group(watch: LayerWatch, progress: Progress, told: queue.Queue[LayersDone]) -> None:
    """The step begins with none; the last group is the smallest."""
    heard: list[int] = []
    with watch.reporting(step_of(groups=3)):
        heard.append(told.get(timeout=WAIT_S).layers)
        for done in (3, 5, 7):
            progress.layers = done
            heard.append(told.get(timeout=WAIT_S).layers)
    assert heard == [0, 3, 5, 7]


def test_the_word_of_the_step_before_does_not_count(
    watch: LayerWatch, progress: Progress, told: queue.Queue[LayersDone]
) -> None:
    progress.layers = LAYERS
    with watch.reporting(step_of(groups=7, attempt=4)):
        assert told.get(timeout=WAIT_S) == LayersDone(WorkerId("w"), ((RequestId("r"), 4),), 0)
        progress.layers = 1
        assert told.get(timeout=WAIT_S).layers == 1
    assert told.empty()


def test_one_thread_watches_one_step_after_the_other(
    watch: LayerWatch, progress: Progress, told: queue.Queue[LayersDone]
) -> None:
    """A step that ends before its layers were looked at is told by its report alone."""
    for attempt in range(50):
        with watch.reporting(step_of(groups=7, attempt=attempt)):
            assert told.get(timeout=WAIT_S).layers == 0
            if attempt % 2:
                progress.layers = 2
                heard = told.get(timeout=WAIT_S)
                while heard.layers < 2:
                    heard = told.get(timeout=WAIT_S)
                assert heard.requests == ((RequestId("r"), attempt),)


def test_groups_are_no_more_than_layers() -> None:
    assert step_of(groups=99).layer_ends(4) == [1, 2, 3, 4]
    assert step_of(groups=1).layer_ends(4) == [4]
    assert step_of(groups=4).layer_ends(30) == [8, 16, 23, 30]
