"""One NIXL agent and the only thread that calls it. The thread polls during transfers and sleeps otherwise.

NIXL's own progress thread uses a core even when idle, so it is off. This thread polls UCX instead: for transfers of
this host, and over TCP also while other hosts read its memory. Source: references/transports.md, section 3.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.move.transport.device_memory import Location
from baton.move.transport.piecewise_pull import BUG

_SPINS = 200
"""Polls without progress before the thread pauses between two polls."""

_PAUSE_S = 0.0005

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Side:
    """Runs of memory at one end of a transfer."""

    kind: Literal["DRAM", "VRAM"]
    runs: npt.NDArray[np.uint64]
    """Rows of (address, size, device)."""


class NixlAgent:
    """The operations of NIXL that `NixlTransport` needs. Raises TransferError if the extra `nixl` is not installed."""

    def __init__(self, name: str, *, devices: str | None = None) -> None:
        """`devices`: network devices for UCX, in the format of `UCX_NET_DEVICES`. None: all."""
        self._nixl = _library(devices)
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._moving: list[Callable[[], bool]] = []
        """Functions that poll one transfer each, and return False once it is over."""
        self._waiting: set[Future[Any]] = set()
        """Futures that other threads wait for."""
        self._readers = 0
        self._closed = False
        self._agent: Any = None
        self._registered: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="baton-nixl", daemon=True)
        self._thread.start()
        self._call(lambda: self._open(name))

    def register(self, location: Location, size_bytes: int) -> None:
        """Register memory with the network. Raises TransferError if UCX cannot reach a GPU's memory."""
        memory = [(location.address, size_bytes, location.device, "")]
        self._call(lambda: self._registered.append(self._agent.register_memory(memory, location.kind)))

    def metadata(self) -> bytes:
        """Return the description that another agent needs to read this agent's memory."""
        return self._call(lambda: self._agent.get_agent_metadata())

    def add_remote_agent(self, metadata: bytes) -> str:
        """Register another agent. Return its name."""
        return _text(self._call(lambda: self._agent.add_remote_agent(metadata)))

    def read(self, agent: str, remote: Side, local: Side) -> None:
        """Copy runs of another agent's memory to local runs, in pairs of equal size, and wait.

        Raises TransferError if it fails.
        """
        done = self._awaited()
        try:
            self._call(lambda: self._start(agent, remote, local, done))
        except TransferError:
            self._waiting.discard(done)
            raise
        done.result()

    def add_readers(self, count: int) -> None:
        """Change the number of hosts that read this agent's memory. The thread polls while there are any."""
        with self._changed:
            self._readers += count
            self._changed.notify_all()

    def close(self) -> None:
        """Release NIXL. No thread is left when this returns."""
        with self._changed:
            is_over = self._closed  # a bug has ended the thread, or it is closed already
        if not is_over:
            self._call(self._shut)
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        self._thread.join()

    def _call(self, work: Callable[[], T]) -> T:
        done = self._awaited()

        def call() -> None:
            try:
                done.set_result(work())
            except self._nixl.errors as error:
                done.set_exception(TransferError(f"NIXL refuses: {error}"))

        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()
        return done.result()

    def _awaited(self) -> Future[Any]:
        """Return a future that is completed even if a bug ends the thread."""
        done: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise TransferError("the NIXL agent is closed")
            self._waiting.add(done)
        done.add_done_callback(self._waiting.discard)
        return done

    def _run(self) -> None:
        try:
            self._turn()
        finally:
            with self._changed:
                self._closed = True
                waiting = list(self._waiting)
            for done in waiting:
                done.set_exception(TransferError(BUG))

    def _turn(self) -> None:
        """Run calls and poll transfers until the agent is closed."""
        quiet_turns = 0
        while True:
            with self._changed:
                if not (self._calls or self._moving or self._readers):
                    self._changed.wait_for(lambda: self._calls or self._readers or self._closed)
                    quiet_turns = 0
                elif quiet_turns > _SPINS and not self._calls:
                    self._changed.wait(_PAUSE_S)
                if self._closed:
                    return
                calls, self._calls = self._calls, []
                readers = self._readers
            for call in calls:
                call()
            before = len(self._moving)
            self._moving = [poll for poll in self._moving if poll()]
            heard = bool(self._agent.get_new_notifs()) if readers and self._agent is not None else False
            quiet_turns = 0 if calls or heard or len(self._moving) < before else quiet_turns + 1

    def _open(self, name: str) -> None:
        config = self._nixl.config(enable_prog_thread=False, backends=["UCX"])
        self._agent = self._nixl.agent(name, config)

    def _shut(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None

    def _start(self, agent: str, remote: Side, local: Side, done: Future[None]) -> None:
        local_list = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local.runs, local.kind)
        remote_list = self._agent.prep_xfer_dlist(agent, remote.runs, remote.kind)
        order = np.arange(len(local.runs), dtype=np.int32)
        transfer = self._agent.make_prepped_xfer("READ", local_list, order, remote_list, order, b"")
        states = [self._agent.transfer(transfer)]

        def poll() -> bool:
            failure: str | None = None
            try:
                if states[-1] == "PROC":
                    states[-1] = self._agent.check_xfer_state(transfer)
                if states[-1] == "PROC":
                    return True
                if states[-1] != "DONE":
                    failure = f"NIXL's transfer ended as {states[-1]}"
            except self._nixl.errors as error:
                failure = f"NIXL's transfer failed: {type(error).__name__} {error}; see whether the source is up"
            for handle in (transfer, local_list, remote_list):
                handle.release()
            done.set_exception(TransferError(failure)) if failure else done.set_result(None)
            return False

        self._moving.append(poll)


@dataclass(frozen=True, slots=True)
class _Library:
    """The parts of the NIXL package that Baton uses."""

    agent: Any
    config: Any
    errors: tuple[type[Exception], ...]


def _library(devices: str | None) -> _Library:
    if not Path("/sys/class/infiniband").is_dir():
        # without RDMA hardware, UCX's modules for it are useless and crash at exit in their destructors
        os.environ.setdefault("UCX_MODULES", "cma,cuda" if Path("/dev/nvidiactl").exists() else "cma")
    if devices is not None:
        os.environ["UCX_NET_DEVICES"] = devices
    try:
        from nixl_cu12 import _api, _bindings
    except ImportError as error:
        raise TransferError(f"NIXL is not installed ({error}): pip install 'baton[nixl]', or use tcp") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # NIXL prints a greeting on stdout
    errors = (
        _bindings.nixlBackendError,
        _bindings.nixlRemoteDisconnectError,
        _bindings.nixlInvalidParamError,
        _bindings.nixlNotFoundError,
        _bindings.nixlMismatchError,
        _bindings.nixlNotAllowedError,
        _bindings.nixlCancelledError,
        _bindings.nixlUnknownError,
    )
    return _Library(_api.nixl_agent, _api.nixl_agent_config, errors)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
