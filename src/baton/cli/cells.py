"""The cells of a simulated cluster, played in as many processes as there are cores."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.metrics.summary import RequestRecord
from baton.policy.named import named
from baton.sim.cells import CellJob, cell_jobs, decode_records, merged
from baton.sim.spec import ClusterSpec
from baton.workload.request import Trace


def play_cells(
    spec: ClusterSpec, trace: Trace, *, policy: str | PolicyConfig, seed: int, slo: Slo | None, processes: int
) -> list[RequestRecord]:
    """Play a trace on a cluster of cells, at most `processes` of them at once, and return what `replay_trace` returns.

    Raises ConfigError for an unknown policy, and with the last words of a process that did not come to its end.
    """
    config = named(policy) if isinstance(policy, str) else policy
    jobs = cell_jobs(spec, trace, config, seed=seed, slo=slo)
    with ThreadPoolExecutor(max_workers=processes) as threads:  # each waits for a process: they compute nothing
        return merged(threads.map(_played, jobs))


def _played(job: CellJob) -> list[RequestRecord]:
    command = [sys.executable, "-m", "baton.sim.one_cell"]
    done = subprocess.run(command, input=msgspec.msgpack.encode(job), capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ConfigError(
            f"a process that played a cell ended with {done.returncode}: {words[-1]}; "
            "lower --processes if memory is short"
        )
    return decode_records(done.stdout)
