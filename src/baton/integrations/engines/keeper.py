"""Run one engine server, and end all its processes when Baton ends, even by kill -9.

Engine servers start processes of their own. They run in one process group, which this process kills as soon as its
standard input closes or the server itself has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_END_S = 15.0
"""Time that a server has to end after SIGTERM."""


def main(argv: list[str]) -> int:
    """Run the command until it ends. Return its exit code, as a shell does for a signal."""
    try:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error}\n")
        return 127
    signal.signal(signal.SIGTERM, lambda *_: _signal(server, signal.SIGTERM))
    threading.Thread(target=_end_with_baton, args=(server,), daemon=True).start()
    code = server.wait()
    _signal(server, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _end_with_baton(server: subprocess.Popen[bytes]) -> None:
    """Wait until Baton closes its end of the pipe, then end the server."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _signal(server, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_END_S)
    _signal(server, signal.SIGKILL)


def _signal(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
