"""A mover whose thread fails exits: only its death can answer the lost order."""

from __future__ import annotations

import subprocess
import sys

FAILING = """
import threading
from baton.serve.host.mover import Mover
from baton.decide.kv.layout import KVLayout
from baton.serve.messages.moving import MoverFailed, MoverSetup, WithdrawBlocks

class Outbox:
    def put(self, message):
        if not isinstance(message, MoverFailed):
            raise LookupError("nobody expects this")
        print(message.reason, flush=True)

layout = KVLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=1, dtype="uint8")
setup = MoverSetup(host="a", arena_bytes=8, layout=layout, transports=(), listen="", advertise="")
mover = Mover(setup, memoryview(bytearray(8)), 0, Outbox())
mover.handle(WithdrawBlocks(1))
threading.Event().wait()
"""


def test_a_thread_that_fails_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "LookupError: nobody expects this" in done.stdout) == (1, True), done.stdout + done.stderr
