"""Simulate the cells of a cluster in parallel processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton.core.errors import ConfigError
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import CellJob, decode_records, merge_records


def play_cells(jobs: Sequence[CellJob], *, processes: int) -> list[RequestRecord]:
    """Simulate all cells of a cluster, at most `processes` at a time. Return the records of `replay_trace`.

    Raises ConfigError with the last output line of a process that failed.
    """
    with ThreadPoolExecutor(max_workers=processes) as threads:  # a thread only waits for its process
        return merge_records(threads.map(_played, jobs))


def _played(job: CellJob) -> list[RequestRecord]:
    command = [sys.executable, "-m", "baton.lab.sim.one_cell"]
    done = subprocess.run(command, input=msgspec.msgpack.encode(job), capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ConfigError(
            f"the simulation of a cell exited with {done.returncode}: {words[-1]}; lower --processes if memory is short"
        )
    return decode_records(done.stdout)
