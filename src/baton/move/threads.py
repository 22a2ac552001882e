"""A small thread pool that survives a bug in one of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


class WorkThreads:
    """Daemon threads that run submitted calls in order. They start on demand.

    If a bug ends a thread, its traceback is printed and another thread takes its place.
    """

    def __init__(self, name: str, threads_max: int, on_stranded: Callable[[str], None] | None = None) -> None:
        """`on_stranded` gets an error message if the last thread has ended and no other can be started."""
        self._name = name
        self._threads_max = threads_max
        self._on_stranded = on_stranded
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Bounded by the callers of `submit`."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """Running threads, and some that have ended."""
        self._running = 0
        self._stopped = False

    def submit(self, call: Callable[[], None]) -> str:
        """Submit a call; after `stop` it is dropped. Return an error message if no thread can run it, else ""."""
        with self._lock:
            if self._stopped:
                return ""
            why = self._start() if self._running < self._threads_max else ""
            if not self._running:
                return why
            self._queue.put(call)
            return ""

    def stop(self) -> None:
        """Drop the queued calls, and end the threads once their current calls are done."""
        with self._lock:
            self._stopped = True
            try:
                while True:
                    self._queue.get_nowait()
            except Empty:
                pass
            for _ in self._threads:
                self._queue.put(None)

    def join(self, left_s: Callable[[], float | None] = lambda: None) -> bool:
        """Wait for each thread for `left_s()` seconds, evaluated before each wait. Return whether all have ended."""
        for thread in self._threads:
            thread.join(left_s())
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> str:
        """Start one more thread. Return an error message if that fails. The caller holds the lock."""
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
            while (call := self._queue.get()) is not None:
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
            is_stranded = bool(why) and not self._running
        if is_stranded and self._on_stranded is not None:
            self._on_stranded(why)
