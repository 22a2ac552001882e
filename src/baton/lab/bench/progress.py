"""A progress bar on a terminal; silence everywhere else."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton.lab.bench.client import Reply
from baton.lab.bench.run import RunListener


@contextmanager
def watching(console: Console) -> Generator[RunListener]:
    """A watcher that draws on the console if somebody can see it."""
    if not console.is_terminal:
        yield RunListener()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        bar = _Bar(progress, progress.add_task("warming up", total=None))
        yield RunListener(on_start=bar.start, on_reply=bar.advance)


class _Bar:
    """Counts replies; shows how many went wrong."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._bad = 0

    def start(self, requests: int) -> None:
        self._progress.update(self._task, description="requests", total=requests)

    def advance(self, reply: Reply) -> None:
        self._bad += reply.record.outcome != "finished"
        words = f"requests ({self._bad} not finished)" if self._bad else "requests"
        self._progress.update(self._task, advance=1, description=words)
