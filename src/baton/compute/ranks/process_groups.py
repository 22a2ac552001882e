"""Connect the ranks of one parallel worker, and exchange tensors between them, over torch.distributed.

Ranks on CPUs use gloo over loopback, ranks on GPUs use NCCL. The groups belong to one worker: no state is shared by
the whole process.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, GatherOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from baton.compute.ranks.place import RankPlace
from baton.compute.torch.layers.collectives import PendingSum, Ready
from baton.core.errors import ModelError

ADDRESS = "127.0.0.1"
TIMEOUT_S = 300.0
"""Longest wait for another rank. By default the server kills a silent worker earlier, after `survival.silent_s`."""
_TIMEOUT = timedelta(seconds=TIMEOUT_S)


class ProcessGroup(Protocol):
    """The methods of torch's process groups that Baton uses."""

    def allreduce(self, tensor: Tensor, /) -> Work: ...

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: GatherOptions, /
    ) -> Work: ...

    def _allgather_base(self, output: Tensor, rows: Tensor, /) -> Work: ...

    def alltoall_base(
        self,
        output: Tensor,
        rows: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        options: AllToAllOptions,
        /,
    ) -> Work: ...

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int, /) -> Work: ...


@dataclass(frozen=True, slots=True)
class _Sum:
    """Implements `PendingSum` with a running all-reduce."""

    total: Tensor
    work: Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.total


class GroupCollectives:
    """Implements `Collectives` over process groups."""

    def __init__(self, place: RankPlace, stage: ProcessGroup, column: ProcessGroup, context: ProcessGroup) -> None:
        """stage: group of this rank's stage, ordered by column. column: group of its column, ordered by stage.

        context: group of the ranks that share the tokens of its KV heads, ordered by column.
        """
        self.place = place
        self._stage = stage
        self._column = column
        self._context = context

    def begin_sum(self, partial: Tensor) -> PendingSum:
        if self.place.tensor == 1:
            return Ready(partial)
        partial = partial.contiguous()
        return _Sum(partial, self._stage.allreduce(partial))

    def gather(self, columns: Tensor) -> Tensor | None:
        options = GatherOptions()
        options.rootRank = 0
        first = self.place.column == 0
        parts = [torch.empty_like(columns) for _ in range(self.place.tensor)] if first else []
        self._stage.gather([parts] if first else [], [columns.contiguous()], options).wait()
        return torch.cat(parts, 1) if first else None

    def all_gather(self, rows: Tensor) -> Tensor:
        return _gathered(self._stage, rows, self.place.tensor)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        output = rows.new_empty(sum(received), *rows.shape[1:])
        self._stage.alltoall_base(output, rows.contiguous(), received, sent, AllToAllOptions()).wait()
        return output

    def gather_context(self, rows: Tensor) -> Tensor:
        return _gathered(self._context, rows, self.place.context).unflatten(0, (self.place.context, -1))

    def exchange_context(self, parts: Tensor) -> Tensor:
        output = torch.empty_like(parts, memory_format=torch.contiguous_format)
        self._context.alltoall_base(output, parts.contiguous(), [], [], AllToAllOptions()).wait()
        return output

    def send_to_next(self, hidden: Tensor) -> None:
        """Send hidden states. Returns once they are sent (on a GPU: queued on its stream), not once received."""
        self._column.send([hidden.contiguous()], (self.place.stage + 1) % self.place.pipeline, 0).wait()

    def receive_from_previous(self, hidden: Tensor) -> None:
        self._column.recv([hidden], (self.place.stage - 1) % self.place.pipeline, 0).wait()


def _gathered(group: ProcessGroup, rows: Tensor, ranks: int) -> Tensor:
    output = rows.new_empty(ranks * len(rows), *rows.shape[1:])
    group._allgather_base(output, rows.contiguous()).wait()
    return output


def host_rendezvous() -> TCPStore:
    """Open the store through which ranks find each other, on a free port (`port`). The first rank keeps it open.

    The listening socket is made here, because the store's own would listen at every address without a password.
    """
    with socket.create_server((ADDRESS, 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    return TCPStore(ADDRESS, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor)


def join_rendezvous(port: int) -> TCPStore:
    """Connect to the store that the first rank opened on this port."""
    return TCPStore(ADDRESS, port, None, False, _TIMEOUT)


def connect_ranks(place: RankPlace, store: Store, device: torch.device) -> GroupCollectives:
    """Connect this rank with the others: over gloo on CPUs, over NCCL on GPUs.

    All ranks call it at the same time, because each waits for the others. On a GPU, `device` becomes the current
    device of this process. Raises ModelError where this PyTorch was built without NCCL.
    """
    sharing, number = divmod(place.column, place.context)
    members = (
        _Membership(PrefixStore(f"stage-{place.stage}", store), place.column, place.tensor),
        _Membership(PrefixStore(f"column-{place.column}", store), place.stage, place.pipeline),
        _Membership(PrefixStore(f"context-{place.stage}-{sharing}", store), number, place.context),
    )
    groups = _gloo_groups(members) if device.type == "cpu" else _nccl_groups(members, device)
    return GroupCollectives(place, *groups)


class _Membership(NamedTuple):
    """The arguments that make this rank a member of a process group."""

    store: Store
    rank: int
    size: int


def _gloo_groups(members: Sequence[_Membership]) -> list[ProcessGroup]:
    """Create gloo groups that share one device (a thread). The address is numeric, so no host name is looked up."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=ADDRESS)]
    options._timeout = _TIMEOUT
    return [ProcessGroupGloo(*member, options) for member in members]


def _nccl_groups(members: Sequence[_Membership], device: torch.device) -> list[ProcessGroup]:
    try:
        from torch.distributed import ProcessGroupNCCL
    except ImportError as error:
        raise ModelError(
            f"ranks on GPUs talk over NCCL, which torch {torch.__version__} was built without;"
            " install a build with CUDA, or use --device cpu"
        ) from error
    torch.cuda.set_device(device)
    groups: list[ProcessGroup] = []
    for member in members:
        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        groups.append(ProcessGroupNCCL(*member, options))
    return groups
