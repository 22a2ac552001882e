"""The actor that starts `baton host` on a node of Ray and watches it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname

from baton.core.files import make_private_folder

_RUN = (
    "import sys; from baton.move.ipc.child import die_with_parent; die_with_parent(); "
    "from baton.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
_SHOWN_LINES = 3


class HostActor:
    """Runs one `baton host`. Its output goes to the log of the actor."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], cores: int) -> None:
        """`environment`: added to that of the node, for keys. `cores`: as in `StartHosts`."""
        self._claimed = claim_cores(cores)
        if self._claimed:
            os.sched_setaffinity(0, set(self._claimed))
        self._process = start_baton(arguments, environment)

    def place(self) -> str:
        """Return the machine and the process id of the host, for messages."""
        return f"{gethostname()} (pid {self._process.pid})"

    def wait(self) -> str:
        """Wait until the host ends. Return how it ended, with the end of its output."""
        last: deque[str] = deque(maxlen=_SHOWN_LINES)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last.append(line.strip())
        return f"it ended with code {self._process.wait()}: {'; '.join(last)}"


def start_baton(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command of Baton, with its output in a pipe. The kernel kills it when the actor dies."""
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )


def claim_cores(count: int, folder: Path | None = None) -> dict[int, int]:
    """Return cores of this machine that no other actor of this user has claimed, each with the lock that holds it.

    Hosts on one node would otherwise pin their workers to the same cores. Empty: there are too few.
    """
    if not count or not hasattr(os, "sched_getaffinity"):
        return {}
    folder = folder or Path(tempfile.gettempdir()) / f"baton-cores-{os.getuid()}"
    make_private_folder(folder)
    claimed: dict[int, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        lock = os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        claimed[core] = lock
        if len(claimed) == count:
            return claimed
    for lock in claimed.values():
        os.close(lock)
    return {}
