"""Control of a live server with the real model: what admission, classes, fair queues and roles hold under attack.

    python benchmarks/live_control.py [SCENE ...]

Scenes: overload, aborts, deaths, prices, classes, fairness, roles. `all`, the default, is all but roles, in about
eight minutes. Each load is scaled to the speed of the machine, which is measured first.
Writes benchmarks/results/live-SCENE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from _live_faults import aborts, deaths, prices
from _live_load import Load, Planned, configured, latencies, percentile, poisson
from _live_sharing import classes, fairness, roles

from baton.core.types import Slo
from tests.serving import RunningServer

REQUEST = Planned(input_tokens=64, output_tokens=32)
SLO_RATIO = 6.0
"""SLO of a request, as a multiple of its latencies on an idle server."""
SHARES = (0.7, 1.0, 3.0)
"""Offered load as shares of the capacity."""
OVERLOAD_S = 12.0
TOGETHER = 40
FLEET = ("--prefill", "1", "--decode", "1")


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
    with configured("", *FLEET) as server:
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


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "overload": overload,
    "aborts": aborts,
    "deaths": deaths,
    "prices": prices,
    "classes": classes,
    "fairness": fairness,
    "roles": roles,
}


def main(names: Sequence[str]) -> None:
    """Play the scenes and write their figures, each as soon as it is known."""
    for name in names:
        record.write(f"live-{name}", SCENES[name]())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="*", choices=(*SCENES, "all"), default="all", metavar="SCENE")
    scenes = parser.parse_args().scene
    main([name for name in SCENES if name != "roles"] if "all" in scenes else scenes)
