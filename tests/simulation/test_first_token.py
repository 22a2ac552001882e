"""The first token drawn by decode: prefill leaves it, and the prompt's last token, to whoever goes on."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.messages import PrefillFinished, StartPrefill
from baton.core.types import RequestId, WorkerId
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death
from tests.campaign.play import play
from tests.campaign.scenario import PlannedRequest
from tests.campaign.triggers import Fault, KillAtStep
from tests.simulation.test_behaviour import outcome, request
from tests.simulation.test_hosts import landings, two_hosts

R = RequestId("r")


def left_to_decode(*requests: PlannedRequest, faults: tuple[Fault, ...] = ()) -> SimCluster:
    return play(two_hosts(*requests, faults=faults, policy="first-token-by-decode"))


def handed_over(cluster: SimCluster) -> list[int]:
    events = [decision.event for decision in cluster.server.journal.decisions()]
    return [event.computed_tokens for event in events if isinstance(event, PrefillFinished)]


def untils(cluster: SimCluster) -> list[str]:
    commands = [command for decision in cluster.server.journal.decisions() for command in decision.commands]
    return [command.until for command in commands if isinstance(command, StartPrefill)]


def steps(cluster: SimCluster, worker: str) -> int:
    found = cluster.worker(WorkerId(worker))
    assert found is not None
    return found.steps


def test_decode_draws_the_first_token_and_computes_one_more_token_for_it() -> None:
    """13 of 14 tokens go over; INV-8 is checked at the end, so the text is the same."""
    cluster = left_to_decode(request("r", tokens=14))
    assert handed_over(cluster) == [13]
    assert [event.computed_tokens for event in landings(cluster)] == [13]
    assert (steps(cluster, "prefill-0"), steps(cluster, "decode-0")) == (1, 8)
    life = cluster.server.journal.lives[R]
    assert life.handoffs_s[0] < life.token_times_s[0]


def test_the_first_token_waits_for_the_handoff_and_the_second_does_not() -> None:
    """What it costs and what it buys: the same work, the wait before the first token instead of behind it."""
    ours = left_to_decode(request("r", tokens=14)).server.journal.lives[R].token_times_s
    theirs = play(two_hosts(request("r", tokens=14))).server.journal.lives[R].token_times_s
    assert ours[0] > theirs[0]
    assert ours[1] - ours[0] < theirs[1] - theirs[0]


def test_a_prompt_that_is_all_there_is_handed_over_without_a_step() -> None:
    """The same prompt again: prefill has every token of it but the last, and says so at once."""
    first = request("q", tokens=13)
    again = replace(first, id=R, at_s=1.0)
    cluster = left_to_decode(first, again)
    assert handed_over(cluster) == [12, 12]
    assert steps(cluster, "prefill-0") == 1
    life = cluster.server.journal.lives[R]
    assert (outcome(life), life.worker) == ("finished", "decode-0")


def test_what_comes_with_the_first_token_is_not_left_to_decode() -> None:
    """Log probabilities of a prompt come from whoever has seen all of it; of one token there is nothing to leave."""
    asked = request("r", tokens=14)
    asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=True))
    assert untils(left_to_decode(asked)) == ["first_token"]
    assert untils(left_to_decode(request("r", tokens=1))) == ["first_token"]
    assert untils(left_to_decode(request("r", tokens=2))) == ["prompt"]


def test_an_answer_of_one_token_is_decodes_alone() -> None:
    cluster = left_to_decode(request("r", tokens=14, output=1))
    assert len(cluster.server.journal.lives[R].output) == 1
    assert steps(cluster, "decode-0") == 1


def test_a_decode_worker_that_dies_before_the_first_token_is_replaced() -> None:
    kill = KillAtStep(worker=WorkerId("decode-0"), step=1, moment="during", death=Death(restart_s=0.1))
    cluster = left_to_decode(request("r", tokens=14), faults=(kill,))
    life = cluster.server.journal.lives[R]
    assert (outcome(life), life.attempt) == ("finished", 2)


def test_a_prefill_worker_that_dies_under_a_prompt_leaves_it_again() -> None:
    kill = KillAtStep(worker=WorkerId("prefill-0"), step=2, moment="during", death=Death(restart_s=0.1))
    cluster = left_to_decode(request("r", tokens=150), faults=(kill,))
    assert set(untils(cluster)) <= {"prompt", "end"}
    assert outcome(cluster.server.journal.lives[R]) == "finished"


def test_a_prompt_that_is_sent_ahead_lands_but_for_its_end() -> None:
    made = two_hosts(request("r", tokens=600), policy="first-token-by-decode")
    cluster = play(replace(made, cluster=replace(made.cluster, kv=replace(made.cluster.kv, blocks=400))))
    landed = [event.computed_tokens for event in landings(cluster)]
    assert landed[-1] == 599
    assert len(landed) >= 4
