"""Control of a live server with the real model: what admission, classes, fair queues and roles hold under attack.

    python benchmarks/live_control.py [SCENE ...] [--soak-minutes N] [--storm-minutes N]

Scenes: overload, aborts, deaths, hosts, prices, classes, fairness, roles, storm, soak. `all`, the default, is all but
the last three, in about ten minutes; roles takes ten more. Each load is scaled to the speed of the machine, which is
measured first. Writes benchmarks/results/live-SCENE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from _live_faults import aborts, deaths, hosts, prices
from _live_load import NO_DRAFTS, Answer, Load, Planned, configured, latencies, percentile, poisson
from _live_sharing import classes, fairness, roles
from _live_storm import storm

from baton.core.types import Slo
from tests.process.storm import descriptors, memory_bytes
from tests.serving import RunningServer

REQUEST = Planned(input_tokens=64, output_tokens=32)
SLO_RATIO = 6.0
"""SLO of a request, as a multiple of its latencies on an idle server."""
SHARES = (0.7, 1.0, 3.0)
"""Offered load as shares of the capacity."""
OVERLOAD_S = 30.0
TOGETHER = 40
FLEET = ("--prefill", "1", "--decode", "1")
SOAK_RATIO = 0.8
"""Load of the soak as a share of the capacity."""
SOAK_PARTS = 6
"""The first and the last of so many equal parts of the soak are compared."""
SAMPLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The SLO by the latencies of an idle server, and the rate at which it completes many requests at once."""

    slo: Slo
    capacity_rps: float


async def measure(server: RunningServer) -> Measured:
    async with Load(server, seed=1) as load:
        alone = await load.one_by_one(REQUEST, 6)
        together = await load.play([REQUEST] * TOGETHER)
    span_s = max(answer.ended_s for answer in together) - min(answer.sent_s for answer in together)
    ttft_s = percentile([answer.ttft_s for answer in alone], 0.5)
    tpot_s = percentile([answer.tpot_s for answer in alone], 0.5)
    return Measured(Slo(ttft_s=SLO_RATIO * ttft_s, tpot_s=SLO_RATIO * tpot_s), len(together) / span_s)


async def offer(server: RunningServer, rate_rps: float, slo: Slo, seed: int) -> dict[str, Any]:
    """Play one rate, and return its figures."""
    async with Load(server, seed) as load:
        answers = await load.play(poisson(rate_rps, OVERLOAD_S, REQUEST, seed))
    refused = [answer for answer in answers if answer.is_refused]
    admitted = [answer for answer in answers if not answer.is_refused]
    failed = [answer.failure for answer in admitted if answer.failure]
    met = sum(answer.meets(slo) for answer in admitted)
    return {
        "rate_rps": round(rate_rps, 2),
        "requests": len(answers),
        "refused": len(refused),
        "failed": failed[:3],
        "goodput_rps": round(met / OVERLOAD_S, 3),
        "admitted_in_slo_ratio": round(met / len(admitted), 3) if admitted else None,
        "ttft": latencies([answer.ttft_s for answer in admitted if answer.is_whole]),
        "tpot": latencies([answer.tpot_s for answer in admitted if answer.is_whole]),
        "refusal": latencies([answer.ended_s - answer.sent_s for answer in refused]),
    }


def overload() -> dict[str, Any]:
    """Three times the capacity, with admission and without."""
    with configured(NO_DRAFTS, *FLEET) as server:
        measured = asyncio.run(measure(server))
    slo = f"[slo]\nttft_s = {measured.slo.ttft_s}\ntpot_s = {measured.slo.tpot_s}\n"
    rows: dict[str, Any] = {}
    for name, policy, shares in (
        ("admission", "", SHARES),
        ("admit-all", '[policy.admission]\nuse = "admit-all"\n', SHARES[-1:]),
    ):
        with configured(policy + slo, *FLEET) as server:
            rows[name] = {
                f"{share:g}": asyncio.run(offer(server, share * measured.capacity_rps, measured.slo, seed))
                for seed, share in enumerate(shares)
            }
    peak_rps = max(row["goodput_rps"] for row in rows["admission"].values())
    over_rps = rows["admission"][f"{SHARES[-1]:g}"]["goodput_rps"]
    return {
        "capacity_rps": round(measured.capacity_rps, 2),
        "slo_ttft_s": round(measured.slo.ttft_s, 3),
        "slo_tpot_s": round(measured.slo.tpot_s, 4),
        "peak_rps": peak_rps,
        "goodput_over_peak": round(over_rps / peak_rps, 3) if peak_rps else None,
        **rows,
    }


def soak(duration_s: float) -> dict[str, Any]:
    """Keep 80 % of the capacity busy, and compare the last part with the first one."""
    with configured("", *FLEET) as server:
        measured = asyncio.run(measure(server))
        return asyncio.run(_soak(server, SOAK_RATIO * measured.capacity_rps, duration_s))


async def _soak(server: RunningServer, rate_rps: float, duration_s: float) -> dict[str, Any]:
    part_s, samples = duration_s / SOAK_PARTS, list[tuple[int, int]]()

    async def sample() -> None:
        while True:
            pids = (server.process.pid, *await asyncio.to_thread(server.worker_pids))
            samples.append((sum(map(memory_bytes, pids)), sum(map(descriptors, pids))))
            await asyncio.sleep(SAMPLE_S)

    async with Load(server, seed=20) as load:
        sampling = asyncio.create_task(sample())
        answers = await load.play(poisson(rate_rps, duration_s, REQUEST, 20))
        sampling.cancel()

    def part(answers: Sequence[Answer], samples: Sequence[tuple[int, int]]) -> dict[str, Any]:
        whole = [answer for answer in answers if answer.is_whole]
        return {
            "ttft": latencies([answer.ttft_s for answer in whole]),
            "tpot": latencies([answer.tpot_s for answer in whole]),
            "memory_mb": round(percentile([memory for memory, _ in samples], 0.5) / 1e6),
            "descriptors": round(percentile([count for _, count in samples], 0.5)),
        }

    each = len(samples) // SOAK_PARTS
    return {
        "minutes": round(duration_s / 60, 1),
        "rate_rps": round(rate_rps, 2),
        "requests": len(answers),
        "refused": sum(answer.is_refused for answer in answers),
        "failed": [answer.failure for answer in answers if answer.failure and not answer.is_refused][:3],
        "first": part([answer for answer in answers if answer.planned.at_s < part_s], samples[:each]),
        "last": part([answer for answer in answers if answer.planned.at_s >= duration_s - part_s], samples[-each:]),
    }


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "overload": overload,
    "aborts": aborts,
    "deaths": deaths,
    "hosts": hosts,
    "prices": prices,
    "classes": classes,
    "fairness": fairness,
}
LONG_SCENES = ("roles", "storm", "soak")
"""Scenes that `all` leaves out."""


def main(names: Sequence[str], soak_s: float, storm_s: float) -> None:
    """Play the scenes and write their figures, each as soon as it is known."""
    scenes = {**SCENES, "roles": roles, "storm": partial(storm, storm_s), "soak": partial(soak, soak_s)}
    for name in names:
        record.write(f"live-{name}", scenes[name]())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="*", choices=(*SCENES, *LONG_SCENES, "all"), default="all", metavar="SCENE")
    parser.add_argument("--soak-minutes", type=float, default=60.0, metavar="N")
    parser.add_argument("--storm-minutes", type=float, default=10.0, metavar="N")
    args = parser.parse_args()
    main(list(SCENES) if "all" in args.scene else args.scene, 60 * args.soak_minutes, 60 * args.storm_minutes)
