"""Check planned fleets in the simulator, which runs the real coordinator, batchers and pools."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.play import FleetResults, FleetSimulator
from baton.lab.plan.search import Search, Shape, Worth

HEADROOM = 1.05
"""Factor on a fleet's rate in simulation. Nearer to saturation, the result depends on the random sequence of
arrivals."""
DERATING_STEP = 0.96
DERATINGS = tuple(DERATING_STEP**step / HEADROOM for step in range(9))
"""Derating factors, largest first, for a bisection. A smaller factor means less load per worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedFleet:
    """A fleet and its simulation results."""

    fleet: PlannedFleet
    derate: float
    """Factor on the screened capacity for which this fleet was found."""
    played: FleetResults | None
    """Simulation results, or None without a complete simulation.

    A simulation is skipped if a fleet that meets the SLO is worth more. It stops early if too many requests miss the
    SLO.
    """
    holds: bool
    """The simulated share of requests within the SLO reached the wanted share."""

    def worth(self, search: Search) -> tuple[bool, float, float]:
        """Return a sort key: first whether the fleet meets the SLO in simulation, then `Search.worth`."""
        return self.holds, *search.worth(self.fleet)


def verify(
    search: Search, shape: Shape, simulator: FleetSimulator, *, beat: Worth | None = None
) -> VerifiedFleet | None:
    """Return the fleet with the largest derating factor that meets the SLO in simulation.

    With `beat`, only fleets that are worth more are simulated. If no factor meets the SLO, return the fleet of
    the smallest factor that has one, with `holds` false. None: the screening finds no fleet.
    """
    wanted, last = search.demand.attainment_ratio, len(DERATINGS) - 1
    misses, holds = -1, len(DERATINGS)
    found: VerifiedFleet | None = None
    while holds - misses > 1:
        place = 0 if misses < 0 else (misses + holds) // 2
        derate = search.derate * DERATINGS[place]
        fleet = replace(search, derate=derate).fleet(shape)
        if fleet is None and not place:  # the GPUs carry the rate, with their reserve, but not `HEADROOM` times it
            derate, fleet, holds, last = search.derate, search.fleet(shape), 1, 0
        if fleet is None:
            holds, last = place, place - 1
            continue
        if beat is not None and search.worth(fleet) <= beat:
            holds = place
            found = found or VerifiedFleet(fleet=fleet, derate=derate, played=None, holds=False)
            continue
        played = simulator.play(fleet, load=HEADROOM, wanted_ratio=0.0 if place == last else wanted)
        if played is not None and played.attainment_ratio >= wanted:
            holds, found = place, VerifiedFleet(fleet=fleet, derate=derate, played=played, holds=True)
        else:
            misses = place
            if found is None or not found.holds:
                found = VerifiedFleet(fleet=fleet, derate=derate, played=played, holds=False)
    if found is not None and misses == last and found.played is None:  # a miss that ended early, and the last fleet
        return replace(found, played=simulator.play(found.fleet, load=HEADROOM))
    return found
