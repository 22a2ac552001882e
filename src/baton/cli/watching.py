"""Write the decisions of each simulated cell to logs and timelines, for `baton sim`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.decide.control.decision_log import Decision, SimHeader
from baton.decide.policy.policy_sets import own_sources
from baton.lab.report.summary import RequestRecord
from baton.lab.report.timeline import Timeline, join_timelines
from baton.lab.sim.cells import CellJob
from baton.lab.sim.replay_trace import play_cell
from baton.serve.live.log_file import LogWriter

LOG_BYTES_MAX = 64 << 30
"""Maximum size of all logs of a run together: larger than any useful log, and smaller than most disks."""


class Watching:
    """Simulates cells, and records their decisions in logs and timelines as requested."""

    def __init__(self, *, log: Path | None, cells: int, drawn: bool) -> None:
        """`log`: path of the decision log. `cells`: number of cells. `drawn`: whether to record timelines."""
        self.wanted = drawn or log is not None
        self._log, self._cells = log, cells
        self._timelines = [Timeline() for _ in range(cells if drawn else 0)]
        self.records: list[list[RequestRecord]] = []
        """Request records of each cell that was simulated."""

    @property
    def timeline(self) -> Timeline:
        """The joined timeline of all cells. Use it after the last `play`."""
        return self._timelines[0] if self._cells == 1 else join_timelines(self._timelines)

    def play(self, job: CellJob) -> None:
        """Simulate the next cell. Raises ConfigError if its log cannot be written completely."""
        number = len(self.records)
        log = None if self._log is None else self._open_log(self._log, number, job)
        self.records.append(play_cell(job, self._tap(number, log)))
        if log is not None:
            _close(log)

    def _open_log(self, path: Path, number: int, job: CellJob) -> LogWriter:
        cluster = msgspec.json.encode(job.spec).decode()
        header = SimHeader(cluster=cluster, policy=job.policy, sources=own_sources(job.policy))
        return LogWriter(log_path(path, number, self._cells), header, LOG_BYTES_MAX // self._cells)

    def _tap(self, number: int, log: LogWriter | None) -> Callable[[Decision], None] | None:
        """Return a function that records a decision, or None if nothing is recorded."""
        takers: list[Callable[[Decision], None]] = [] if log is None else [log.append]
        if self._timelines:
            takers.append(self._timelines[number].take)
        if not takers:
            return None

        def tap(decision: Decision) -> None:
            for take in takers:
                take(decision)

        return tap


def log_path(path: Path, number: int, cells: int) -> Path:
    """Return the path of a cell's log: `path`, or if there are several cells, `run.c2.log` for `run.log`."""
    return path if cells == 1 else path.with_name(f"{path.stem}.c{number}{path.suffix}")


def _close(log: LogWriter) -> None:
    log.close()
    if log.full:
        raise ConfigError(
            f"the decision log {log.path} is incomplete: the disk is full, or the log is too long; "
            "free some space, or lower --limit"
        )
