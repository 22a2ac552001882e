"""A few threads that do what is submitted to them, whatever a bug does to one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


def _nobody_is_told(_why: str) -> None:
    """What was submitted is answered for by somebody else."""


class WorkThreads:
    """Threads that do what is submitted, in that order. They start with the work, and keep no process from ending.

    One that a bug ends is told of by its traceback, and replaced: what comes next is still done.
    """

    def __init__(self, name: str, threads_max: int, deserted: Callable[[str], None] = _nobody_is_told) -> None:
        """`deserted` hears why nobody does what was submitted: a bug has ended the last thread, and no other starts."""
        self._name = name
        self._threads_max = threads_max
        self._deserted = deserted
        self._wanted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Bounded by whoever submits."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """Those that run, and those that ended lately."""
        self._running = 0
        self._stopped = False

    def submit(self, call: Callable[[], None]) -> str:
        """Have something done. Returns why nobody will; empty where somebody does, or nothing more is to be done."""
        with self._lock:
            if self._stopped:
                return ""
            why = self._start() if self._running < self._threads_max else ""
            if not self._running:
                return why
            self._wanted.put(call)
            return ""

    def stop(self) -> None:
        """Forget what has not begun, and end when what has begun is done."""
        with self._lock:
            self._stopped = True
            try:
                while True:
                    self._wanted.get_nowait()
            except Empty:
                pass
            for _ in self._threads:
                self._wanted.put(None)

    def join(self, left_s: Callable[[], float | None] = lambda: None) -> bool:
        """Wait for the end, for each thread at most so many seconds as are left then. Returns whether it has come."""
        for thread in self._threads:
            thread.join(left_s())
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> str:
        """Start one more. Returns why there is none, which matters where no other runs. Call with the lock held."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            return f"no thread of {self._name} can be started: {error}"
        self._running += 1
        self._threads.append(thread)
        return ""

    def _run(self) -> None:
        is_over = False
        try:
            while (call := self._wanted.get()) is not None:
                call()
            is_over = True
        finally:
            if not is_over:
                self._replace()

    def _replace(self) -> None:
        with self._lock:
            self._running -= 1
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            why = "" if self._stopped else self._start()
            is_deserted = bool(why) and not self._running
        if is_deserted:
            self._deserted(why)
