"""Run a command to which the kernel refuses io_uring, which CRIU cannot save: `without_io_uring.py COMMAND ARGUMENTS`.

The event loop then uses epoll alone. Docker and containerd refuse io_uring by default; there this is not needed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
ENOSYS = 38
IO_URING_SETUP = 425
"""Number of the system call, which is the same on all architectures."""
FILTER = (
    (LOAD_NUMBER, 0, 0, 0),
    (JUMP_IF_EQUAL, 0, 1, IO_URING_SETUP),
    (RETURN, 0, 0, FAIL | ENOSYS),
    (RETURN, 0, 0, ALLOW),
)


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_io_uring() -> None:
    """Let io_uring_setup fail in this process and its children. Raises OSError if the kernel has no seccomp filters."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in FILTER))
    program, libc = Program(len(FILTER), ctypes.addressof(code)), ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "the system call io_uring_setup cannot be refused: prctl failed")


if __name__ == "__main__":
    refuse_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
