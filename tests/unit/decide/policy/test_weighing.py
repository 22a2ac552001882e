"""`baton explain` shows the order in which the default policy compares workers: it must be the order that decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import HostId, Role, Slo, WorkerView
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.decide.policy.weighing import Weighed, deciding_term
from tests.unit.decide.policy.views import COST, cluster, request, worker

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
SLOS = (None, Slo(ttft_s=2.0, tpot_s=0.05), Slo(ttft_s=0.5, tpot_s=0.012))


def views(place: int, role: Role, queued_requests: int, decodes: int, full_ratio: float) -> WorkerView:
    return worker(
        f"w{place}", role, host=f"h{place % 3}", queued_tokens=400 * queued_requests, queued_requests=queued_requests,
        running_requests=queued_requests + decodes, context_tokens=int(full_ratio * 20_000), kv_tokens_max=20_000,
    )  # fmt: skip


states = st.lists(
    st.tuples(st.sampled_from(ROLES), st.integers(0, 3), st.integers(0, 6), st.sampled_from([0.0, 0.3, 0.98])),
    min_size=1,
    max_size=5,
)


@given(
    states, st.sampled_from(SLOS), st.sampled_from([100, 1000, 3000]), st.sampled_from([0, 80]), st.sampled_from([0, 1])
)
def test_the_lowest_key_is_the_workers_that_is_chosen(
    loads: list[tuple[Role, int, int, float]], slo: Slo | None, prompt_tokens: int, hit_tokens: int, source: int
) -> None:
    workers = [views(place, *load) for place, load in enumerate(loads)]
    view = cluster(*workers, hits={"h1": hit_tokens * prompt_tokens // 100})
    asked, policy = request(slo=slo, prompt_tokens=prompt_tokens), SloHeadroom()
    for role in ("prefill", "decode"):
        candidates = view.having(role) or list(view.workers)
        if role == "prefill":
            weighed = policy.weigh_prompt(asked, candidates, view, COST)
            chosen = policy.route(asked, candidates, view, COST).worker
        else:
            host = HostId(f"h{source}")
            weighed = policy.weigh_answer(asked, host, candidates, view, COST)
            chosen = policy.place(asked, host, candidates, view, COST)
        assert [each.worker for each in weighed] == [each.id for each in workers]
        assert min(weighed, key=lambda each: (each.key, each.worker)).worker == chosen
        assert all(len(each.key) == len(each.terms) for each in weighed)


def test_the_prediction_is_that_of_the_route() -> None:
    """The queue, the prompt and the TTFT that are shown are those by which the route was chosen."""
    busy, idle = worker("a", queued_tokens=900), worker("b", host="g")
    asked, view, policy = request(slo=SLOS[1]), cluster(busy, idle), SloHeadroom()
    weighed = {each.worker: each for each in policy.weigh_prompt(asked, view.workers, view, COST)}
    route = policy.route(asked, view.workers, view, COST)
    assert route.predicted is not None
    assert weighed[route.worker].predicted_s == route.predicted.ttft_s
    assert weighed[busy.id].wait_s > weighed[idle.id].wait_s == 0.0


def named(*, missing: bool, pressure: float, ttft_s: float) -> Weighed:
    return Weighed(
        worker=worker("w").id, predicted_s=ttft_s, key=(float(missing), pressure, ttft_s),
        terms=("misses" if missing else "meets", f"pressure {pressure}", f"TTFT {ttft_s}"),
    )  # fmt: skip


def test_the_deciding_term_is_the_first_one_that_differs() -> None:
    chosen = named(missing=False, pressure=0.5, ttft_s=2.0)
    assert deciding_term(chosen, named(missing=True, pressure=0.1, ttft_s=1.0)) == ("misses", "meets")
    assert deciding_term(chosen, named(missing=False, pressure=0.7, ttft_s=1.0)) == ("pressure 0.7", "pressure 0.5")
    assert deciding_term(chosen, named(missing=False, pressure=0.5, ttft_s=1.0)) is None
