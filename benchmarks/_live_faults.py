"""Scenes of benchmarks/live_control.py in which clients, workers or prices fail."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from _live_load import MODEL, Load, Planned, configured, latencies, percentile

from baton.core.types import Slo, StepShape
from baton.decide.cost.fitted import LoggedStep
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.online import StepLearner
from baton.move.clock import now_s
from tests.hosting import RunningHost, cluster
from tests.serving import RunningServer

FLEET = ("--prefill", "1", "--decode", "1")
CORES = 'idle_cores = "keep"\n'
"""An idle worker lends its cores otherwise, so the TTFT of an idle server would be that of two cores."""
SLO_RATIO = 6.0
"""TTFT SLO, as a multiple of the TTFT of an idle server."""
STORM_S = 6.0
STORM_RATIO = 10.0
HANG_UP_RATIO = 0.9
FRESH = Planned(input_tokens=64, output_tokens=2, label="fresh")
LONG = Planned(input_tokens=64, output_tokens=96)
STREAMS = 16
COPIED = """
default_class = "copied"
[[classes]]
name = "copied"
copy_tokens = 16
[hosts]
silent_s = 2.0
"""
HOST = ("--mixed", "1", "--threads", "1")
HOST_STREAMS = 8
COPIED_REQUEST = Planned(input_tokens=128, output_tokens=96)
LOSS_RATIO = 0.7
"""When the host is lost, as a share of the time that the same load takes without a fault."""
WRONG = LinearCost(step_overhead_s=0.3, prefill_token_s=0.02, decode_request_s=0.05)
"""Prices of a machine that is about ten times slower."""
THROTTLE = (0.004, 0.008)
"""Seconds that a throttled worker runs and is stopped: a third of its speed."""
STEPS_AFTER = 30


def aborts() -> dict[str, Any]:
    """Ten times the load, of which 90 % of the clients hang up at random times: without an SLO, and with one."""
    with configured(CORES, *FLEET) as server:
        free = asyncio.run(_storm(server, rate_rps=None))
    slo = Slo(ttft_s=SLO_RATIO * free["idle_ttft"]["p50_s"], tpot_s=1.0)
    with configured(f"{CORES}[slo]\nttft_s = {slo.ttft_s}\ntpot_s = {slo.tpot_s}\n", *FLEET) as server:
        bound = asyncio.run(_storm(server, rate_rps=free["offered_rps"]))
    return free | {"with_slo": {"slo_ttft_s": round(slo.ttft_s, 3)} | bound}


async def _storm(server: RunningServer, *, rate_rps: float | None) -> dict[str, Any]:
    """Play the storm. `rate_rps` None: ten times the rate at which the server completes many requests at once."""
    request = Planned(input_tokens=64, output_tokens=32)
    async with Load(server, seed=5) as load:
        idle = await load.one_by_one(FRESH, 15, pause_s=0.05)
        if rate_rps is None:
            began_s = now_s()
            await load.play([request] * 16)
            rate_rps = STORM_RATIO * 16 / (now_s() - began_s)
        draw, plan = Random(6), list[Planned]()
        for place in range(round(rate_rps * STORM_S)):
            at_s = place / rate_rps
            hang_up_s = draw.uniform(0.01, STORM_S - at_s) if draw.random() < HANG_UP_RATIO else None
            plan.append(replace(request, at_s=at_s, hang_up_s=hang_up_s))
        storm = asyncio.create_task(load.play(plan))
        await asyncio.sleep(STORM_S)
        calm_s = now_s()
        await asyncio.sleep(1.0)
        after = await load.one_by_one(FRESH, 10, pause_s=0.1)
        answers = await storm
    left = [answer for answer in answers if answer.planned.hang_up_s is None]
    idle_s = [answer.ttft_s for answer in idle]
    after_s = [answer.ttft_s for answer in after if answer.is_whole]
    return {
        "offered_rps": round(rate_rps, 1),
        "requests": len(answers),
        "refused": sum(answer.is_refused for answer in answers),
        "hung_up": sum(answer.failure == "hung up" for answer in answers),
        "stayed_and_finished": sum(answer.is_whole for answer in left),
        "stayed_and_refused": sum(answer.is_refused for answer in left),
        "stayed": len(left),
        "idle_ttft": latencies(idle_s),
        "stayed_and_waiting": sum(answer.is_whole and answer.token_times_s[0] > after[0].sent_s for answer in left),
        "first_after_s": round(after[0].sent_s - calm_s, 2),
        "first_ttft_after_s": round(after_s[0], 4),
        "ttft_after": latencies(after_s),
        "first_over_idle": round(after_s[0] / percentile(idle_s, 0.5), 2),
    }


def deaths() -> dict[str, Any]:
    """Kill the decode worker under 16 streams."""
    with configured("", "--prefill", "1", "--decode", "1") as server:
        return asyncio.run(_kill(server))


async def _kill(server: RunningServer) -> dict[str, Any]:
    async with Load(server, seed=7) as load:
        bodies = [load.body(LONG) for _ in range(STREAMS)]
        calm = await asyncio.gather(*(load.send(LONG, body) for body in bodies))
        state = await asyncio.to_thread(server.cluster)
        [pid] = [worker["pid"] for worker in state["workers"] if worker["role"] == "decode"]
        running = asyncio.gather(*(load.send(LONG, body) for body in bodies))
        await asyncio.sleep(0.5 * (max(a.ended_s for a in calm) - min(a.sent_s for a in calm)))
        os.kill(pid, signal.SIGKILL)
        killed = await running
    gaps = sorted(answer.gap_s_max for answer in killed)
    step_s = percentile([answer.tpot_s for answer in calm], 0.5)
    return {
        "streams": STREAMS,
        "same_text": sum(one.text == other.text for one, other in zip(calm, killed, strict=True)),
        "longest_gap_calm_s": round(max(answer.gap_s_max for answer in calm), 3),
        "longest_gap_s": round(gaps[-1], 3),
        "median_gap_s": round(gaps[len(gaps) // 2], 3),
        "step_s": round(step_s, 4),
    }


def hosts() -> dict[str, Any]:
    """Lose one of two hosts under streams with second copies: it dies, or it stops without closing a connection."""
    found: dict[str, Any] = {}
    for name, number in (("killed", signal.SIGKILL), ("silent", signal.SIGSTOP)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "baton.toml"
            path.write_text(COPIED)
            with cluster(MODEL, {"a": HOST, "b": HOST}, "--config", str(path)) as (server, joined):
                found[name] = asyncio.run(_lose_host(server, joined, number))
    return found


async def _lose_host(server: RunningServer, joined: dict[str, RunningHost], number: int) -> dict[str, Any]:
    """Send the signal to all processes of the host with more streams, in the middle of them."""
    async with Load(server, seed=10) as load:
        calm = await load.play([COPIED_REQUEST] * HOST_STREAMS)
        bodies = [load.body(COPIED_REQUEST) for _ in range(HOST_STREAMS)]  # of these prompts, no block is cached
        running = asyncio.gather(*(load.send(COPIED_REQUEST, body) for body in bodies))
        await asyncio.sleep(LOSS_RATIO * (max(a.ended_s for a in calm) - min(a.sent_s for a in calm)))
        state = await asyncio.to_thread(server.cluster)
        worker = max(state["workers"], key=lambda worker: worker["running"])
        agent = joined[worker["id"].partition(".")[0]].process.pid
        for pid in (agent, *_descendants(agent)):
            with suppress(ProcessLookupError):  # they end with their agent
                os.kill(pid, number)
        lost = await running
        read, recomputed = [
            await asyncio.to_thread(server.metric, "baton_failover_tokens_total", f'kv="{kind}"')
            for kind in ("read", "recomputed")
        ]
        os.kill(agent, signal.SIGKILL)
        again = await asyncio.gather(*(load.send(COPIED_REQUEST, body) for body in bodies))
    return {
        "streams": HOST_STREAMS,
        "moved": worker["running"],
        "same_text": sum(one.text == other.text for one, other in zip(again, lost, strict=True)),
        "failed": [answer.failure for answer in (*lost, *again) if answer.failure][:3],
        "longest_gap_calm_s": round(max(answer.gap_s_max for answer in calm), 3),
        "longest_gap_s": round(max(answer.gap_s_max for answer in lost), 3),
        "step_s": round(percentile([answer.tpot_s for answer in calm], 0.5), 4),
        "moved_prompt_tokens": worker["running"] * COPIED_REQUEST.input_tokens,
        "read_tokens": round(read),
        "recomputed_tokens": round(recomputed),
    }


def _descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *_descendants(child))]


def prices() -> dict[str, Any]:
    """Wrong prices on an idle server, then a worker that runs at a third of its speed."""
    with tempfile.TemporaryDirectory() as folder:
        cost = msgspec.structs.asdict(WRONG)
        lines = "\n".join(f"{name} = {value}" for name, value in cost.items())
        config = f'step_log = "{folder}/steps"\n[slo]\nttft_s = 1.0\ntpot_s = 0.1\n[cost]\n{lines}\n'
        with configured(config, "--mixed", "1") as server:
            found = asyncio.run(_mispriced(server))
        [path] = Path(folder).glob("steps/*.jsonl")
        decoder = msgspec.json.Decoder(LoggedStep)
        steps = [decoder.decode(line) for line in path.read_text().splitlines()]
    return found | _learned(steps, found.pop("throttled_at_s"))


async def _mispriced(server: RunningServer) -> dict[str, Any]:
    async with Load(server, seed=8) as load:
        alone = await load.one_by_one(Planned(input_tokens=32, output_tokens=4), 30)
        ended = asyncio.Event()
        slo = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "10000"}
        busy = Planned(input_tokens=64, output_tokens=32, headers=slo)
        running = asyncio.create_task(load.keep(busy, clients=4, until=ended))
        await asyncio.sleep(4.0)
        stopped = threading.Event()
        throttled_at_s = now_s()
        throttle = threading.Thread(target=_throttle, args=(server.worker_pids()[0], stopped))
        throttle.start()
        await asyncio.sleep(15.0)
        ended.set()
        await running
        stopped.set()
        throttle.join()
    return {
        "idle_requests": len(alone),
        "idle_refused": sum(answer.is_refused for answer in alone),
        "throttled_at_s": throttled_at_s,
    }


def _throttle(pid: int, stopped: threading.Event) -> None:
    """Let a process run for a third of the time."""
    runs_s, stops_s = THROTTLE
    while not stopped.wait(runs_s):
        os.kill(pid, signal.SIGSTOP)
        stopped.wait(stops_s)
        os.kill(pid, signal.SIGCONT)


def _learned(steps: list[LoggedStep], changed_at_s: float) -> dict[str, Any]:
    """Return the errors of the predictions of the worker's steps before and after a change of speed.

    The same learner as in the worker gets the same steps.
    """
    learner, before, after = StepLearner(WRONG), list[float](), list[float]()
    times: dict[str, list[float]] = {"before": [], "after": []}
    for step in steps:
        shape = StepShape(
            prefill_tokens=step.prefill_tokens,
            prefill_chunks=step.prefill_chunks,
            prefill_pairs=step.prefill_pairs,
            decode_requests=step.decode_requests,
            context_tokens=step.context_tokens,
        )
        error = learner.cost.step_s(shape) / step.step_s - 1.0
        is_after = step.at_s >= changed_at_s
        (after if is_after else before).append(error)
        if shape.decode_requests == 4 and not shape.prefill_tokens:
            times["after" if is_after else "before"].append(step.step_s)
        learner.observe(shape, step.step_s)
    slower = percentile(times["after"], 0.5) / percentile(times["before"], 0.5)
    late = sorted(abs(error) for error in after[STEPS_AFTER:])
    return {
        "steps_before": len(before),
        "steps_after": len(after),
        "slowdown": round(slower, 2),
        "first_error_after": round(after[0], 3),
        "median_error_before": round(percentile([abs(e) for e in before[STEPS_AFTER:]], 0.5), 3),
        "median_error_after": round(percentile(late, 0.5), 3),
        "p90_error_after": round(percentile(late, 0.9), 3),
        "bias_after": round(sum(after[STEPS_AFTER:]) / len(late), 3),
    }
