"""Every error that a caller may meet.

BatonError
├── ConfigError       the user can fix it: bad arguments, a bad file. The message lists every problem. Exit code 2
├── ModelError        a model that cannot be loaded: unknown architecture, missing tensor, refused format
├── RequestError      a client's request is wrong; carries the parameter and the HTTP status
├── ArenaError        the host refuses the memory that the KV cache needs
├── TransferError     KV bytes did not come over from another host: the request is computed again, or elsewhere
├── StoreError        a tier below the arena cannot be opened: the server does not start. One that fails later is a miss
└── WorkerError       a worker process could not start, or died
"""

from __future__ import annotations


class BatonError(Exception):
    """Something that the person in front of Baton can act on."""


class ConfigError(BatonError):
    """The configuration is wrong. One problem per line; all of them at once."""


class ModelError(BatonError):
    """The model cannot be served. The message says what to use instead."""


class RequestError(BatonError):
    """A client's request cannot be served as it is.

    `status` is the HTTP status, `param` the offending field, `code` OpenAI's machine-readable code.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class ArenaError(BatonError):
    """The KV arena cannot be created or mapped."""


class TransferError(BatonError):
    """KV bytes did not come over from another host."""


class StoreError(BatonError):
    """A tier below the arena cannot be used. The message says what to set."""


class WorkerError(BatonError):
    """A worker process failed. The message holds the end of its output."""
