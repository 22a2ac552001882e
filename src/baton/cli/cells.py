"""The cells of a simulated cluster, played in as many processes as there are cores."""

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
    """Play all cells of a cluster (`cell_jobs`), at most `processes` of them at once: what `replay_trace` returns.

    Raises ConfigError with the last words of a process that did not come to its end.
    """
    with ThreadPoolExecutor(max_workers=processes) as threads:  # each waits for a process: they compute nothing
        return merge_records(threads.map(_played, jobs))


def _played(job: CellJob) -> list[RequestRecord]:
    command = [sys.executable, "-m", "baton.lab.sim.one_cell"]
    done = subprocess.run(command, input=msgspec.msgpack.encode(job), capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ConfigError(
            f"a process that played a cell ended with {done.returncode}: {words[-1]}; "
            "lower --processes if memory is short"
        )
    return decode_records(done.stdout)
