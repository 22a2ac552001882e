"""What a carrier cannot do itself: the seam between deciding and doing, one implementation per driver."""

from __future__ import annotations

from typing import Protocol

from baton.core.copies import CopyBlocks
from baton.core.keeping import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.messages import CloseRequest, RetireWorker, SetRole, StartWorker, WorkerCommand
from baton.core.types import TokenBytes, WorkerId
from baton.decide.control.handoffs import Start


class Outside(Protocol):
    """What a carrier cannot do itself: reach processes, wires and clients."""

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """Pass a command on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...

    def copy(self, copy: CopyBlocks) -> None:
        """Begin to copy blocks between two hosts. `Carrier.copied` is called once for it, however it ends."""
        ...

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Have bytes moved between an arena and the tiers below it.

        `Keeping.kept` or `Keeping.loaded` is called once for a write or a read, however it ends and within a stated
        time: whatever a store does, nobody waits for ever.
        """
        ...

    def assign(self, command: Start) -> TokenBytes:
        """Note who has the request now, and return its tokens so far: the server holds the truth about them."""
        ...

    def close(self, command: CloseRequest) -> None:
        """Tell the client how its request ended."""
        ...

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """Change the fleet."""
        ...
