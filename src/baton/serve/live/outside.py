"""What the carrier of the live server reaches: worker processes, and the requests of clients."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.core.copies import CopyBlocks
from baton.core.keeping import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.messages import (
    BlocksGranted,
    CloseRequest,
    RetireWorker,
    SetRole,
    StartDecode,
    StartPrefill,
    StartRequest,
    StartWorker,
    WorkerCommand,
)
from baton.core.types import HostId, RequestId, Role, TokenBytes, WorkerId, WorkerView, pack_tokens
from baton.decide.control.load_meter import LoadMeter
from baton.decide.kv.layout import KVLayout
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.recorder import Recorder


class LiveOutside:
    """Implements `Outside`: it knows every worker and every request that is alive."""

    def __init__(self, recorder: Recorder, meter: LoadMeter) -> None:
        self.live: dict[RequestId, LiveRequest] = {}
        self.links: dict[WorkerId, WorkerLink] = {}
        self.layouts: dict[HostId, KVLayout] = {}
        """How KV lies on each host that is there."""
        self.on_close: Callable[[], None] | None = None
        """Called after each request that has ended."""
        self.on_resize: Callable[[StartWorker | RetireWorker], None] | None = None
        """Called when a scaling policy asks for a worker more or less."""
        self.on_copy: Callable[[CopyBlocks], None] | None = None
        """Called with every copy between two hosts that is to begin."""
        self.on_keep: Callable[[StoreBlocks | DropBlocks | LoadBlocks], None] | None = None
        """Called with everything that a pool wants of its tiers."""
        self._recorder = recorder
        self._meter = meter

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """See `Outside.send`."""
        link = self.links.get(worker)
        if link is None:
            return
        if isinstance(command, BlocksGranted):
            block_tokens = self.layouts[link.view.host].block_tokens
            self._note_hit(command.request_id, command.cached_blocks * block_tokens)
        elif isinstance(command, StartRequest):
            self._note_hit(command.request.id, command.computed_tokens)
            link.view = _given(link.view, command)
        link.send(command)

    def copy(self, copy: CopyBlocks) -> None:
        """See `Outside.copy`."""
        assert self.on_copy is not None, f"{copy.request_id} is to be copied to {copy.target}, and nobody copies"
        self.on_copy(copy)

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """See `Outside.keep`."""
        assert self.on_keep is not None, f"this server has no tier below its arena, and its pool asks for {command}"
        self.on_keep(command)

    def assign(self, command: StartPrefill | StartDecode) -> TokenBytes:
        """See `Outside.assign`."""
        live = self.live[command.request.id]
        if command.attempt > live.attempt and self._has_moved(live):
            live.stamps.moves += 1
            self._recorder.moved()
        elif command.attempt > live.attempt:
            self._recorder.failed_over()
        if isinstance(command, StartDecode) and not live.output_tokens:
            live.stamps.leave(live.worker, now_s())
        live.attempt, live.worker = command.attempt, command.worker
        return pack_tokens(live.tokens)

    def close(self, command: CloseRequest) -> None:
        """See `Outside.close`."""
        live = self.live.pop(command.request_id)
        finish = Finish(
            outcome="finished" if live.stopped and command.outcome == "cancelled" else command.outcome,
            reason="stop" if live.stopped else live.finish_reason,
            message=command.reason,
            reject=command.reject,
            retry_after_s=command.retry_after_s,
        )
        live.close(finish)
        first_s = live.stamps.prefilled_s
        decode_s = now_s() - first_s if first_s is not None else 0.0
        self._meter.closed(finish.outcome, output_tokens=live.output_tokens, decode_s=decode_s)
        self._recorder.closed(finish)
        if self.on_close is not None:
            self.on_close()

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """See `Outside.reshape`."""
        if isinstance(command, SetRole):
            self.flip(self.links[command.worker], command.role)
        elif self.on_resize is not None:
            self.on_resize(command)

    def flip(self, link: WorkerLink, role: Role) -> None:
        """Note a worker's new role."""
        link.view = msgspec.structs.replace(link.view, role=role)
        self._recorder.role_flipped()

    def _note_hit(self, request_id: RequestId, cached_tokens: int) -> None:
        """Note how much of a prompt was there when its first worker began: on its host, or come over from another."""
        live = self.live.get(request_id)
        if live is not None and live.stamps.started_s is None and cached_tokens:
            live.stamps.cached_tokens = cached_tokens

    def _has_moved(self, live: LiveRequest) -> bool:
        """A policy has moved it from a worker that lives on: that is no failover."""
        link = self.links.get(live.worker) if live.worker is not None else None
        return link is not None and link.state == "ready"


def _given(view: WorkerView, start: StartRequest) -> WorkerView:
    """Count a request that the worker has been given: it reports it with the first step that it is in."""
    if start.block_table:
        return msgspec.structs.replace(view, running_requests=view.running_requests + 1)
    return msgspec.structs.replace(view, waiting_requests=view.waiting_requests + 1)
