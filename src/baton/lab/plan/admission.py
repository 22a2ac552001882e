"""What the server should do with a request that would be late: take it all the same, or refuse it. Both are played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from baton.lab.plan.play import FleetSimulator
from baton.lab.plan.verify import HEADROOM, VerifiedFleet

Admission = Literal["slo", "all"]
"""Refuse what is predicted to miss the SLO, or take everything while the queue has room."""
PLAYED_MAX = 1_000
"""Requests of a simulation: which of the two is better shows early."""
OVERLOAD = 1.5
"""Times the planned rate: what the two differ in is seen above capacity."""


class AdmissionResult(Struct, frozen=True, kw_only=True):
    """How a fleet does under one admission. A refused request did not meet the SLO."""

    admission: Admission
    attainment_ratio: float
    """At the rate at which fleets are verified."""
    overload: float
    """Times the planned rate."""
    overload_attainment_ratio: float
    overload_goodput_rps: float
    """Requests a second within the SLO then."""


def play_admissions(
    plays: FleetSimulator, chosen: VerifiedFleet, choices: Sequence[Admission]
) -> list[AdmissionResult]:
    """Play the fleet under each admission, at the rate of its verification and above it. The better ones come first.

    Better: the SLO is met at that rate, then the goodput above it.
    """
    fleet = chosen.fleet

    def attained(admission: Admission, load: float) -> float:
        if admission == "all" and load == HEADROOM and chosen.played is not None:
            return chosen.played.attainment_ratio  # so it was verified
        played = plays.play(fleet, load=load, promised=admission == "slo", requests_max=PLAYED_MAX)
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
    wanted = plays.search.demand.attainment_ratio
    return sorted(found, key=lambda each: (each.attainment_ratio < wanted, -each.overload_attainment_ratio))


def describe_admission(found: Sequence[AdmissionResult]) -> list[str]:
    """Which admission, and what it is worth. Nothing where none was played."""
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
