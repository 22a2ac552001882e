"""The calls of Ray that Baton uses, on this machine alone: an actor is a thread of the calling process.

A bundle with a resource that is neither CPU, GPU nor memory is never placed.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ray.exceptions import RayError

PLACEABLE = {"CPU", "GPU", "memory"}


def init(address: str, **_options: object) -> None:
    if address != "auto":
        raise ConnectionError("Could not find any running Ray instance.\nMore lines follow.")


def nodes() -> list[dict[str, object]]:
    return [{"NodeManagerAddress": "127.0.0.1", "Alive": True}]


class Reference:
    def __init__(self) -> None:
        self._future: Future[object] = Future()

    def future(self) -> Future[object]:
        return self._future

    def settle(self, result: object = None, error: BaseException | None = None) -> None:
        if not self._future.done():
            self._future.set_exception(error) if error is not None else self._future.set_result(result)


class Actor:
    """One thread makes the object and calls its methods, in order."""

    def __init__(self, kind: type, options: dict, arguments: tuple) -> None:
        bundles = options["scheduling_strategy"].group.bundles
        self._placed = threading.Event()
        if all(set(bundle) <= PLACEABLE for bundle in bundles):
            self._placed.set()
        self._thread = ThreadPoolExecutor(1)
        self._calls: list[Reference] = []
        self._object: object = None
        self._is_dead = False
        options["scheduling_strategy"].group.actors.append(self)
        self._thread.submit(self._make, kind, arguments)

    def _make(self, kind: type, arguments: tuple) -> None:
        self._placed.wait()
        if not self._is_dead:
            self._object = kind(*arguments)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str) -> Reference:
        reference = Reference()
        self._calls.append(reference)
        self._thread.submit(self._call, name, reference)
        return reference

    def _call(self, name: str, reference: Reference) -> None:
        if not self._is_dead:
            reference.settle(getattr(self._object, name)())

    def die(self) -> None:
        self._is_dead = True
        self._placed.set()
        for reference in self._calls:
            reference.settle(error=RayError("The actor died unexpectedly before finishing this task."))
        process = getattr(self._object, "_process", None)
        if process is not None:
            process.kill()
        self._thread.shutdown(wait=False)


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self.remote = partial(actor.call, name)


class Remote:
    def __init__(self, kind: type, options: dict) -> None:
        self._kind = kind
        self._options = options

    def options(self, **options: object) -> Remote:
        return Remote(self._kind, options)

    def remote(self, *arguments: object) -> Actor:
        return Actor(self._kind, self._options, arguments)


def remote(kind: type) -> Remote:
    return Remote(kind, {})


def kill(actor: Actor) -> None:
    actor.die()
