"""Scenes of benchmarks/live_control.py in which classes, tenants or kinds of load share a fleet."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from _live_load import NO_DRAFTS, Answer, Load, Planned, configured, latencies, percentile

from baton.cli.logs import open_log
from baton.core.types import Slo
from baton.lab.report.service_gap import gap_bound, largest_gap
from baton.lab.report.timeline import read_timeline
from tests.serving import RunningServer

TIERS = """
idle_cores = "keep"
[batch]
requests_max = 16
[[classes]]
name = "premium"
priority = -1
prefill_ratio = 0.95
decode_ratio = 0.25
kv_ratio = 0.25
[[classes]]
name = "free"
[[routes]]
service_class = "premium"
headers = { "x-tier" = "premium" }
[[routes]]
service_class = "free"
headers = { "x-tier" = "free" }
"""
PREMIUM = Planned(input_tokens=256, output_tokens=8, headers={"x-tier": "premium"})
FREE = Planned(input_tokens=200, output_tokens=64, headers={"x-tier": "free"})
FREE_CLIENTS = 48
PREMIUM_REQUESTS = 20
GAP_RATIO = 2.0
"""Mean time between premium requests, as a multiple of the time of one on an idle server."""
TENANTS = """
[http]
api_keys = ["one", "other"]
admin_key = "admin"
[batch]
requests_max = 5
"""
FCFS = '[policy.fairness]\nuse = "fcfs"\n'
KV_BLOCKS = 30
"""So that the bound is smaller than the service of a run: 30 blocks of 16 tokens."""
PATIENT = ("--queue-s", "600")
BACKLOG = 24
ONE, OTHER = Planned(input_tokens=16, output_tokens=8, label="one"), Planned(input_tokens=64, output_tokens=32)
FLIP_S = 1.5
ROLES = """
threads = 1
idle_cores = "keep"
[policy.roles]
use = "{roles}"
{options}
"""
PROMPTS, ANSWERS = Planned(input_tokens=300, output_tokens=4), Planned(input_tokens=32, output_tokens=128)
TURN_S, STEADY_S, ROUNDS = 60.0, 20.0, 1
ADAPTIVE = "adaptive"
USE_RATIO = 0.8
"""Offered load as a share of what a fleet completes within the targets."""
TTFT_RATIO, TPOT_RATIO = 6.0, 2.0
"""Targets as multiples of the latencies on an idle server."""
CLIENTS = {"prompts": (12,), "answers": (4, 8, 12, 18)}
"""Numbers of clients with which the highest rate of each kind is measured."""
SPLIT, MIXED = "1P1D", "2 mixed"
FLEETS = {SPLIT: ("--prefill", "1", "--decode", "1"), MIXED: ("--mixed", "2")}


def classes() -> dict[str, Any]:
    """A free class that saturates the server beside a premium one."""
    found: dict[str, Any] = {}
    for fleet in (("--prefill", "1", "--decode", "1"), ("--mixed", "1")):
        with configured(TIERS, *fleet) as server:
            found[" ".join(fleet)] = asyncio.run(_premium(server))
    return found


async def _premium(server: RunningServer) -> dict[str, Any]:
    draw = Random(3)
    async with Load(server, seed=3) as load:
        idle = await load.one_by_one(PREMIUM, PREMIUM_REQUESTS // 2, pause_s=0.1)
        ended = asyncio.Event()
        crowd = asyncio.create_task(load.keep(FREE, clients=FREE_CLIENTS, until=ended))
        await asyncio.sleep(4.0)
        each_s = GAP_RATIO * percentile([answer.ended_s - answer.sent_s for answer in idle], 0.5)
        gaps_s = [draw.uniform(0.5, 1.5) * each_s for _ in range(PREMIUM_REQUESTS)]
        plan = [replace(PREMIUM, at_s=sum(gaps_s[: place + 1])) for place in range(PREMIUM_REQUESTS)]
        busy = await load.play(plan)
        ended.set()
        free = await crowd
    idle_ttft = latencies([answer.ttft_s for answer in idle])
    busy_ttft = latencies([answer.ttft_s for answer in busy if answer.is_whole])
    return {
        "idle_ttft": idle_ttft,
        "busy_ttft": busy_ttft,
        "p99_over_idle": round(busy_ttft["p99_s"] / idle_ttft["p99_s"], 2) if busy_ttft["count"] else None,
        "premium_failed": [answer.failure for answer in busy if not answer.is_whole][:3],
        "idle_tpot_p50_s": round(percentile([answer.tpot_s for answer in idle], 0.5), 4),
        "busy_tpot_p50_s": round(percentile([answer.tpot_s for answer in busy if answer.is_whole], 0.5), 4),
        "free_finished": sum(answer.is_whole for answer in free),
        "free_refused": sum(answer.is_refused for answer in free),
    }


def fairness() -> dict[str, Any]:
    """Two tenants that both have waiting requests, and one request behind another tenant's sixty."""
    found: dict[str, Any] = {}
    cases = {
        "1P1D": (("--prefill", "1", "--decode", "1"), "", False),
        "1P1D, first come first served": (("--prefill", "1", "--decode", "1"), FCFS, False),
        "2P2D, roles flip": (("--prefill", "2", "--decode", "2"), "", True),
        "mixed": (("--mixed", "1"), "", False),
    }
    for name, (fleet, policy, flips) in cases.items():
        with configured(policy + TENANTS, "--kv-blocks", str(KV_BLOCKS), *PATIENT, *fleet) as server:
            gap, flipped = asyncio.run(_backlogged(server, flips=flips))
        bound = gap_bound(OTHER.input_tokens, KV_BLOCKS * 16)
        found[name] = {"gap": round(gap), "bound": round(bound), "flips": flipped}
    for name, policy in (("fair", ""), ("first come first served", FCFS)):
        with configured(policy + TENANTS, *PATIENT, "--prefill", "1", "--decode", "1") as server:
            found[f"single request, {name}"] = asyncio.run(_single(server))
    return found


def _as(tenant: str, request: Planned) -> Planned:
    return replace(request, label=tenant, headers={"Authorization": f"Bearer {tenant}"})


async def _backlogged(server: RunningServer, *, flips: bool) -> tuple[float, int]:
    plan = [_as(tenant, request) for _ in range(BACKLOG) for tenant, request in (("one", ONE), ("other", OTHER))]
    async with Load(server, seed=4) as load:
        flipping = asyncio.create_task(_flip(server)) if flips else None
        answers = await load.play(plan)
        if flipping is not None:
            flipping.cancel()
    assert all(answer.is_whole for answer in answers), {answer.failure for answer in answers}
    flipped = 0 if flipping is None else await _flips(server)
    return largest_gap([answer.record() for answer in answers], "one", "other"), flipped


async def _flip(server: RunningServer) -> None:
    """Turn a prefill worker and a decode worker round, again and again."""
    roles = {"prefill-1": ("decode", "prefill"), "decode-1": ("prefill", "decode")}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http:
        turn = 0
        while True:
            await asyncio.sleep(FLIP_S)
            for worker, (first, second) in roles.items():
                role = second if turn % 2 else first
                async with http.post(f"{server.url}/cluster/workers/{worker}/role", json={"role": role}) as answer:
                    answer.raise_for_status()
            turn += 1


async def _flips(server: RunningServer) -> int:
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http,
        http.get(f"{server.url}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_role_flips_total ")))


async def _single(server: RunningServer) -> dict[str, Any]:
    async with Load(server, seed=9) as load:
        single = _as("other", Planned(input_tokens=64, output_tokens=8))
        idle = await load.one_by_one(single, 5)
        crowd = [replace(_as("one", Planned(input_tokens=64, output_tokens=64)), hang_up_s=8.0)] * 60
        playing = asyncio.create_task(load.play(crowd))
        await asyncio.sleep(1.0)
        answer = await load.send(single)
        await playing
    return {
        "idle_ttft_s": round(percentile([each.ttft_s for each in idle], 0.5), 3),
        "ttft_s": round(answer.ttft_s, 3) if answer.is_whole else answer.failure,
    }


def roles() -> dict[str, Any]:
    """Two workers of one thread each, on a load that turns from prompts to answers, and on steady loads.

    The load that turns needs both workers in each phase; the steady ones need only what the split has. Arms take turns,
    so that a change of the machine's speed concerns all of them. The roles know the targets, and admission does not:
    arms differ in nothing but their roles.
    """
    static = NO_DRAFTS + ROLES.format(roles="static-roles", options="")
    requests, alone = {"prompts": PROMPTS, "answers": ANSWERS}, dict[str, Answer]()
    capacities: dict[str, dict[str, float]] = {}
    for name, fleet in FLEETS.items():
        with configured(static, *fleet) as server:
            capacities[name] = asyncio.run(_capacities(server, requests, alone))
    ttft_s, tpot_s = TTFT_RATIO * alone["prompts"].ttft_s, TPOT_RATIO * alone["answers"].tpot_s
    targets = {"prompts": Slo(ttft_s=ttft_s, tpot_s=1.0), "answers": Slo(ttft_s=ttft_s, tpot_s=tpot_s)}
    adaptive = NO_DRAFTS + ROLES.format(
        roles="demand-roles", options=f"options = {{ ttft_s = {ttft_s}, tpot_s = {tpot_s} }}"
    )
    arms = {name: (fleet, static) for name, fleet in FLEETS.items()} | {ADAPTIVE: (FLEETS[SPLIT], adaptive)}

    def play(turns: Sequence[tuple[str, float]], capacity_of: str) -> dict[str, Any]:
        """Return the sums over the rounds at the rates that this fleet can serve."""
        rates = {kind: USE_RATIO * rate for kind, rate in capacities[capacity_of].items()}
        rows: dict[str, Counter[str]] = {arm: Counter() for arm in arms}
        reasons: dict[str, list[str]] = {arm: [] for arm in arms}
        for seed in range(ROUNDS):
            plan = _draw(turns, rates, seed)
            for arm, (fleet, config) in arms.items():
                with tempfile.TemporaryDirectory() as folder:
                    log = Path(folder) / "decisions.log"
                    with configured(config, *fleet, "--log", str(log)) as server:
                        rows[arm].update(asyncio.run(_judged(server, plan, targets)))
                    reasons[arm] += _reasons(log)
                print(seed, arm, dict(rows[arm]), *reasons[arm], sep="\n", flush=True)
        goodputs = {arm: sum(row[f"{kind}_in_slo"] for kind in targets) for arm, row in rows.items()}
        ratio = round(goodputs[ADAPTIVE] / goodputs[SPLIT], 3) if goodputs[SPLIT] else None
        return {**rows, "reasons": reasons[ADAPTIVE], "over_best_static": ratio}

    found: dict[str, Any] = {
        "capacities_rps": {
            fleet: {kind: round(rate, 2) for kind, rate in each.items()} for fleet, each in capacities.items()
        },
        "targets_s": {name: [round(slo.ttft_s, 3), round(slo.tpot_s, 4)] for name, slo in targets.items()},
        "rounds": ROUNDS,
    }
    print(found, flush=True)
    found["shifting"] = play([("prompts", TURN_S), ("answers", TURN_S)], MIXED)
    arms.pop(MIXED)
    for kind in requests:
        found[f"steady {kind}"] = play([(kind, STEADY_S)], SPLIT)
    return found


async def _capacities(
    server: RunningServer, requests: Mapping[str, Planned], alone: dict[str, Answer]
) -> dict[str, float]:
    """Return the highest rate of each kind. Adds the answers of an idle server to `alone`, where they are missing."""
    rates: dict[str, float] = {}
    for kind, request in requests.items():
        async with Load(server, seed=11) as load:
            idle = sorted(await load.one_by_one(request, 3), key=lambda answer: answer.ttft_s)[1]
        tpot_s = TPOT_RATIO * alone.setdefault(kind, idle).tpot_s
        rates[kind] = await _capacity(server, request, CLIENTS[kind], tpot_s)
    return rates


async def _capacity(server: RunningServer, request: Planned, clients: Sequence[int], tpot_s_max: float) -> float:
    """Return the highest rate of requests with such a number of clients whose median TPOT is within the maximum.

    The rate with the first number counts in any case.
    """
    async with Load(server, seed=11) as load:
        rate_rps = 0.0
        for count in clients:
            answers = await load.play([request] * count)
            span_s = max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)
            tpot_s = percentile([answer.tpot_s for answer in answers], 0.5)
            print(count, "clients:", round(count / span_s, 2), "requests/s, TPOT", round(tpot_s, 4), flush=True)
            if not rate_rps or tpot_s <= tpot_s_max:
                rate_rps = max(rate_rps, count / span_s)
    return rate_rps


def _draw(turns: Sequence[tuple[str, float]], rates: dict[str, float], seed: int) -> list[Planned]:
    """Draw Poisson arrivals of one kind of request after the other, for so many seconds each."""
    draw, plan, at_s, end_s = Random(12 + seed), list[Planned](), 0.0, 0.0
    kinds = {"prompts": replace(PROMPTS, label="prompts"), "answers": replace(ANSWERS, label="answers")}
    for kind, turn_s in turns:
        at_s, end_s = end_s, end_s + turn_s
        while (at_s := at_s + draw.expovariate(rates[kind])) < end_s:
            plan.append(replace(kinds[kind], at_s=at_s))
    return plan


async def _judged(server: RunningServer, plan: Sequence[Planned], targets: dict[str, Slo]) -> dict[str, int]:
    async with Load(server, seed=13) as load:
        answers = await load.play(plan)
    return {
        "requests": len(answers),
        "refused": sum(answer.is_refused for answer in answers),
        **{f"{kind}_in_slo": _met(answers, kind, slo) for kind, slo in targets.items()},
        **{f"{kind}_late": _late(answers, kind, slo) for kind, slo in targets.items()},
        "flips": await _flips(server),
    }


def _reasons(log: Path) -> list[str]:
    """Return the changes of roles in a log: when, of which worker, and why."""
    return [
        f"{span.start_s - line.roles[0].start_s:.1f} s, {name}, {span.role}: {span.reason}"
        for name, line in read_timeline(open_log(log)[1]).workers.items()
        for span in line.roles[1:]
    ]


def _met(answers: Sequence[Answer], kind: str, slo: Slo) -> int:
    return sum(answer.meets(slo) for answer in answers if answer.planned.label == kind)


def _late(answers: Sequence[Answer], kind: str, slo: Slo) -> int:
    """Return the number of answers whose first token came too late."""
    mine = [answer for answer in answers if answer.planned.label == kind and answer.is_whole]
    return sum(answer.ttft_s > slo.ttft_s for answer in mine)
