"""Checkers are worth what they notice: each is shown a broken run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.messages import ReleaseBlocks, RequestDropped
from baton.core.step import EMPTY_STEP, Step
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.journal import Life
from baton.lab.sim.spec import HOST
from tests.campaign.checkers import (
    Violation,
    check_bounds,
    check_close,
    check_nothing_left,
    check_order,
    check_replay,
    check_text,
)
from tests.campaign.play import play, prepare_play
from tests.campaign.scenario import draw_scenario

SEED = 3


@pytest.fixture
def cluster() -> SimCluster:
    return play(draw_scenario(SEED))


def finished_life(cluster: SimCluster) -> Life:
    return next(
        life
        for life in cluster.server.journal.lives.values()
        if life.closes[0][1].outcome == "finished" and len(life.output) > 2 and life.handoffs_s
    )


def test_a_second_close_breaks_inv_1(cluster: SimCluster) -> None:
    life = finished_life(cluster)
    life.closes += (life.closes[0],)
    with pytest.raises(Violation, match="INV-1"):
        check_close(life, failures_allowed=True)


def test_a_failure_without_a_dead_worker_breaks_inv_1(cluster: SimCluster) -> None:
    life = finished_life(cluster)
    life.closes = ((life.closes[0][0], replace(life.closes[0][1], outcome="failed")),)
    check_close(life, failures_allowed=True)
    with pytest.raises(Violation, match="INV-1"):
        check_close(life, failures_allowed=False)


def test_a_holding_that_is_left_breaks_inv_2(cluster: SimCluster) -> None:
    """A pool that is not told that a request is over keeps it."""
    told = cluster.server.journal.log
    start = next(entry.event for entry in told if type(entry.event).__name__ == "StartPrefill")
    cluster.server.pools[HOST].handle(start)
    with pytest.raises(Violation, match="INV-2"):
        check_nothing_left(cluster)


def test_blocks_that_are_freed_under_a_step_break_inv_3() -> None:
    """Freed in the middle of a step, as a pool would that did not wait for the worker's answer."""
    playing = prepare_play(draw_scenario(SEED))

    def steal() -> None:
        busy = next((worker for worker in playing.cluster.workers if worker.executing is not None), None)
        if busy is None or busy.executing is None:
            playing.cluster.loop.after(0.001, steal)
            return
        holding, pool = busy.executing.slices[0], playing.cluster.server.pools[busy.batcher.host]
        pool.handle(ReleaseBlocks(holding.request_id))
        for worker in playing.cluster.workers:
            pool.handle(RequestDropped(holding.request_id, 1, worker.id, preempted=False))

    playing.cluster.loop.at(0.01, steal)
    with pytest.raises(Violation, match="INV-3"):
        playing.run()


def test_two_requests_in_one_block_break_inv_3() -> None:
    """A batcher that mixes up two block tables is seen before it has written a byte."""
    playing = prepare_play(draw_scenario(SEED))

    def swap() -> None:
        at_work = [worker for worker in playing.cluster.workers if worker.executing is not None]
        parts = [(worker, part) for worker in at_work for part in (worker.executing or EMPTY_STEP).slices]
        if len(parts) < 2:
            playing.cluster.loop.after(0.001, swap)
            return
        (worker, part), (_, other) = parts[:2]
        mixed_up = replace(part, block_table=(*part.block_table[:-1], other.block_table[-1]))
        slices = (worker.executing or EMPTY_STEP).slices
        worker.executing = Step(tuple(mixed_up if each is part else each for each in slices))

    playing.cluster.loop.at(0.01, swap)
    with pytest.raises(Violation, match="INV-3"):
        playing.run()


def test_a_request_that_nobody_takes_breaks_inv_1() -> None:
    """Nothing is left to do, and a client still waits: here because its worker never says anything."""
    playing = prepare_play(draw_scenario(SEED))
    for worker in playing.cluster.workers:
        worker.hung = True
    with pytest.raises(Violation, match=r"INV-1: nothing is left to do"):
        playing.run()


def test_a_run_that_does_not_end_breaks_inv_1() -> None:
    """A livelock is told from a long run by the bound on events."""
    playing = prepare_play(draw_scenario(SEED))

    def again() -> None:
        playing.cluster.loop.after(0.0, again)

    again()
    with pytest.raises(Violation, match=r"INV-1: no end after"):
        playing.run()


def test_a_pin_of_nobody_breaks_inv_4() -> None:
    """Blocks that were taken past the pool's books."""
    playing = prepare_play(draw_scenario(SEED))
    pool = playing.cluster.server.pools[HOST]
    playing.cluster.loop.at(0.02, lambda: pool._blocks.take(1) and None)
    with pytest.raises(Violation, match="INV-4"):
        playing.run()


def test_more_requests_than_admission_allows_break_inv_9() -> None:
    playing = prepare_play(draw_scenario(SEED))
    playing.run()
    playing.watch.live_max = playing.scenario.cluster.queue_requests_max + 1
    with pytest.raises(Violation, match="INV-9"):
        check_bounds(playing.watch)


def test_a_token_before_its_prefill_breaks_inv_5(cluster: SimCluster) -> None:
    life = finished_life(cluster)
    life.token_times_s[0] = life.request.arrived_at_s - 1.0
    with pytest.raises(Violation, match="INV-5"):
        check_order(life)


def test_a_decision_that_depends_on_more_than_the_log_breaks_inv_7(cluster: SimCluster) -> None:
    """An event that the log lacks changes what a replay decides."""
    check_replay(cluster, draw_scenario(SEED).policy)
    log = cluster.server.journal.turns
    joined = next(index for index, entry in enumerate(log) if type(entry.event).__name__ == "WorkerJoined")
    del log[joined]
    with pytest.raises(Violation, match="INV-7"):
        check_replay(cluster, draw_scenario(SEED).policy)


def check_text_of(cluster: SimCluster, life: Life) -> None:
    check_text(life, cluster.spec.window, layers=cluster.spec.layers)


def test_one_wrong_token_breaks_inv_8(cluster: SimCluster) -> None:
    life = finished_life(cluster)
    check_text_of(cluster, life)
    life.tokens[-2] += 1
    with pytest.raises(Violation, match="INV-8"):
        check_text_of(cluster, life)


def test_a_text_that_is_cut_off_breaks_inv_8(cluster: SimCluster) -> None:
    life = finished_life(cluster)
    del life.tokens[-1]
    with pytest.raises(Violation, match="INV-8"):
        check_text_of(cluster, life)
