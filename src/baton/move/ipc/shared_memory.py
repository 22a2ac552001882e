"""Memory that processes of one machine and user share: sealed memory files, lent over Unix sockets.

An abstract socket leaves no file behind and is reachable within one network namespace. A socket in a folder is
reachable from every container of the machine that mounts the folder.
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


def machine_id() -> str:
    """Return an id of this machine: of its running kernel and network namespace, within which abstract sockets work."""
    return f"{boot_id()}.{Path('/proc/self/ns/net').stat().st_ino}"


def boot_id() -> str:
    """Return an id of the running kernel. It is the same in all namespaces, and changes when the machine boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def shares_machine(address: str) -> bool:
    """Return whether a process at this address, `machine/socket`, may be able to lend its memory to this one."""
    machine, _, place = address.partition("/")
    try:
        return machine == (boot_id() if place.startswith("/") else machine_id())
    except OSError:
        return False  # there is no /proc


def bind_in_folder(name: str, folder: Path) -> socket.socket:
    """Return a Unix socket bound to the new file `name` of the folder.

    Files of earlier sockets, whose names differ after the last `-`, are removed if nothing listens on them. Raises
    OSError if the folder is missing, or the path is too long for a socket.
    """
    for old in folder.glob(f"{name.rpartition('-')[0]}-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(old))
            except ConnectionRefusedError:
                old.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(folder / name))
    except OSError:
        listening.close()
        raise
    return listening


def unix_address(place: str) -> str:
    """Return the address for `connect` of a lender's socket: a path, or the name of an abstract socket."""
    return place if place.startswith("/") else "\0" + place


def bind_abstract(name: str) -> socket.socket:
    """Return an abstract Unix socket bound to `name`. Raises OSError if the name is taken."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind("\0" + name)
    except OSError:
        listening.close()
        raise
    return listening


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as the same user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(raw)
    return user == os.geteuid()


def is_hung_up(connection: socket.socket) -> bool:
    """Return whether the process at the other end has hung up or died. Never waits."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def create_sealed(name: str, size_bytes: int) -> int:
    """Create a memory file that cannot shrink, so that it can be lent. Return its descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
    except (OSError, OverflowError):
        os.close(descriptor)
        raise
    return descriptor


def map_sealed(descriptor: int, protection: int) -> memoryview:
    """Map memory that another process lends, for `mmap.PROT_READ` or more.

    Raises ValueError if the file could shrink: reading past its end would kill this process.
    """
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError:
        seals = 0  # it is not a memory file
    if not seals & _SEAL_SHRINK:
        raise ValueError("the source's memory file is not sealed against shrinking; register a sealed memfd")
    size_bytes = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=protection))
