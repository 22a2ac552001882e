"""Compare admission modes by simulation: accept every request, or reject those predicted to miss the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from baton.lab.plan.play import FleetSimulator
from baton.lab.plan.verify import HEADROOM, VerifiedFleet

Admission = Literal["slo", "all"]
"""`slo`: reject requests that are predicted to miss the SLO. `all`: accept every request while the queue has room."""
PLAYED_MAX = 500
"""Bound on a simulation's requests. A short simulation suffices to rank the modes."""
OVERLOAD = 1.5
"""Load as a multiple of the planned rate. The modes differ only above capacity."""


class AdmissionResult(Struct, frozen=True, kw_only=True):
    """Simulated results of a fleet under one admission mode. A rejected request counts as a missed SLO."""

    admission: Admission
    attainment_ratio: float
    """Share of requests within the SLO at the load of the verification."""
    overload: float
    """Load of the overload simulation, as a multiple of the planned rate."""
    overload_attainment_ratio: float
    overload_goodput_rps: float
    """Request rate within the SLO under overload."""


def play_admissions(
    simulator: FleetSimulator, chosen: VerifiedFleet, choices: Sequence[Admission]
) -> list[AdmissionResult]:
    """Return the results of each admission mode at the verification load and under overload, best first.

    Modes that meet the SLO at the verification load come first. Goodput under overload decides among them.
    """
    fleet = chosen.fleet

    def attained(admission: Admission, load: float) -> float:
        if (admission == "slo") == simulator.promised and load == HEADROOM and chosen.played is not None:
            return chosen.played.attainment_ratio  # the verification ran in this mode
        played = simulator.play(fleet, load=load, promised=admission == "slo", requests_max=PLAYED_MAX)
        return played.attainment_ratio if played is not None else 0.0

    found: list[AdmissionResult] = []
    for admission in choices:
        above = attained(admission, OVERLOAD)
        found.append(
            AdmissionResult(
                admission=admission,
                attainment_ratio=attained(admission, HEADROOM),
                overload=OVERLOAD,
                overload_attainment_ratio=above,
                overload_goodput_rps=above * OVERLOAD * fleet.rate_rps,
            )
        )
    wanted = simulator.search.demand.attainment_ratio
    return sorted(found, key=lambda each: (each.attainment_ratio < wanted, -each.overload_attainment_ratio))


def describe_admission(found: Sequence[AdmissionResult]) -> list[str]:
    """Return a sentence that names the best admission mode and its gain. Empty if no mode was simulated."""
    if not found:
        return []
    what = {"slo": "refuse what would miss the SLO", "all": "take every request that the queue has room for"}
    best, *others = found
    words = (
        f"admission {best.admission}: {what[best.admission]}; at {best.overload:g} times the rate "
        f"{best.overload_attainment_ratio:.0%} of the requests meet the SLO"
    )
    words += "".join(f", with {each.admission} {each.overload_attainment_ratio:.0%}" for each in others)
    return [f"{words} (at {HEADROOM:g} times {', '.join(f'{each.attainment_ratio:.0%}' for each in found)})"]
