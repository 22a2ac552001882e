"""Search for the fleet that the simulator lets pass: the real coordinator, batchers and pools decide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.lab.plan.play import FleetResults, FleetSimulator
from baton.lab.plan.search import PlannedFleet, Search, Shape

HEADROOM = 1.05
"""Times its rate that a fleet has to carry in simulation: nearer to saturation one sequence of arrivals is kept up with
and the next is not."""
TRUST_STEP = 0.96
TRUSTS = tuple(TRUST_STEP**step / HEADROOM for step in range(9))
"""Of the screening. First a fleet is played at what it says; where the SLO is missed, the largest of the others that
holds is found by bisection: less trust in the same screening means no more load."""

Worth = tuple[float, float]
"""Of a fleet: the wanted rate as far as it carries it, and what the objective says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedFleet:
    """A fleet, and what the simulator says about it."""

    fleet: PlannedFleet
    derate: float
    """What is left of the screening's trust."""
    played: FleetResults | None
    """None: what its shape would promise is behind a fleet that holds, so it was not searched for. `fleet` is on paper:
    it missed the SLO, or is behind already."""
    holds: bool
    """It met the SLO, for as many requests as were asked for."""

    def worth(self, search: Search) -> tuple[bool, float, float]:
        """For comparing: one that holds is better than any that does not."""
        return self.holds, *worth(self.fleet, search)


def worth(fleet: PlannedFleet, search: Search) -> Worth:
    """For comparing fleets that are believed."""
    return min(fleet.rate_rps, search.demand.rate_rps or 0.0), fleet.value(search.objective)


def verify(search: Search, shape: Shape, plays: FleetSimulator, *, beat: Worth | None = None) -> VerifiedFleet | None:
    """Search and simulate until the fleet of the most trust is found that meets the SLO.

    `beat`: only what is worth more is looked for. None: nothing meets it on paper. One that holds at no trust is given
    as it did with the least.
    """
    wanted, last = search.demand.attainment_ratio, len(TRUSTS) - 1
    misses, holds = -1, len(TRUSTS)
    found: VerifiedFleet | None = None
    while holds - misses > 1:
        place = 0 if misses < 0 else (misses + holds) // 2
        derate = search.derate * TRUSTS[place]
        fleet = replace(search, derate=derate).fleet(shape)
        if fleet is None or not fleet.groups:
            return found
        if beat is not None and worth(fleet, search) <= beat:
            holds = place
            found = found or VerifiedFleet(fleet=fleet, derate=derate, played=None, holds=False)
            continue
        played = plays.play(fleet, load=HEADROOM, wanted_ratio=0.0 if place == last else wanted)
        if played is not None and played.attainment_ratio >= wanted:
            holds, found = place, VerifiedFleet(fleet=fleet, derate=derate, played=played, holds=True)
        else:
            misses = place
            if found is None or not found.holds:
                found = VerifiedFleet(fleet=fleet, derate=derate, played=played, holds=False)
    return found
