"""Play many seeds: `python -m tests.campaign.run --seeds 1000 --faults`. A failed seed prints how to repeat it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from tests.campaign.play import play
from tests.campaign.scenario import draw_scenario, with_clients, with_faults


class SeedFailed(Exception):
    """A seed broke an invariant or raised an error."""


def repeat_line(seed: int, *, faults: bool, clients: bool = False) -> str:
    """Return the command that plays one seed again."""
    flags = f"{' --faults' if faults else ''}{' --clients' if clients else ''}"
    return f".venv/bin/python -m tests.campaign.run --seed {seed}{flags}"


def play_seed(seed: int, *, faults: bool, clients: bool = False) -> bytes:
    """Play one seed under all checkers and return its log. Raises SeedFailed with the command that repeats the seed."""
    drawn = draw_scenario(seed)
    drawn = with_faults(drawn) if faults else drawn
    try:
        cluster = play(with_clients(drawn) if clients else drawn)
    except Exception as error:
        again = repeat_line(seed, faults=faults, clients=clients)
        raise SeedFailed(f"{type(error).__name__}: {error}\nrepeat: {again}") from error
    return cluster.server.journal.encoded()


def run_seeds(seeds: Iterable[int], *, faults: bool, clients: bool = False, out: TextIO) -> int:
    """Play the seeds, write the error of each failed seed to `out`, and return the number of failed seeds."""
    failed = 0
    for seed in seeds:
        try:
            play_seed(seed, faults=faults, clients=clients)
        except SeedFailed as error:
            failed += 1
            out.write(f"{error}\n")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="play only this seed, and let it raise")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to play (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--faults", action="store_true", help="with kills, hangs, delays, cancels and role flips")
    parser.add_argument("--clients", action="store_true", help="with HTTP clients that are slow, die, repeat ids")
    parser.add_argument("--log", type=Path, help="write the event log of --seed into this file")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        log = play_seed(options.seed, faults=options.faults, clients=options.clients)
        if options.log is not None:
            options.log.write_bytes(log)
        return 0
    seeds = range(options.first, options.first + options.seeds)
    failed = run_seeds(seeds, faults=options.faults, clients=options.clients, out=sys.stdout)
    sys.stdout.write(f"{len(seeds)} seeds, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
