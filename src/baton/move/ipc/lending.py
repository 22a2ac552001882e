"""Memory that processes of one machine lend to each other: sealed files without a name, and who may have them.

The file's descriptor goes over an abstract Unix socket, which leaves no file and is reached from one network namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from pathlib import Path

_PEER = struct.Struct("3i")
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK = 2


def machine() -> str:
    """Name this machine, as far as abstract sockets reach and clocks agree: namespaces of one running kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespaces = [Path("/proc/self/ns") / kind for kind in ("net", "time")]  # kernels before 5.6 have one time
    return ".".join([boot, *(str(path.stat().st_ino) for path in namespaces if path.exists())])


def shares_machine(address: str) -> bool:
    """Tell whether a source at this address, which begins with its `machine`, can lend us its memory."""
    try:
        return address.partition("/")[0] == machine()
    except OSError:
        return False  # no /proc here: nobody can tell


def listening_as(name: str) -> socket.socket:
    """Take the name of an abstract socket. Raises OSError where it is taken."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind("\0" + name)
    except OSError:
        listening.close()
        raise
    return listening


def is_ours(connection: socket.socket) -> bool:
    """The process at the other end belongs to the same user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(raw)
    return user == os.geteuid()


def has_ended(connection: socket.socket) -> bool:
    """The other end is closed: its process has hung up, or is gone. Never waits."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def sealed_file(name: str, size_bytes: int) -> int:
    """Make memory that can be lent: a file without a name, which cannot shrink. Returns its descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
    except (OSError, OverflowError):
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, protection: int) -> memoryview:
    """Map what another process lends, for `mmap.PROT_READ` or more.

    Raises ValueError for a file that could shrink under us: reading behind its end would kill this process.
    """
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError:
        seals = 0  # no memfd at all
    if not seals & _SEAL_SHRINK:
        raise ValueError("the source's memory file is not sealed against shrinking; register a sealed memfd")
    size_bytes = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=protection))
