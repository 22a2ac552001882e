"""The exceptions of Baton.

BatonError
├── ConfigError       invalid arguments or an invalid file; the message lists every problem. Exit code 2
├── ModelError        a model that cannot be loaded: unknown architecture, missing tensor, unsupported format
├── RequestError      an invalid request of a client; carries the parameter and the HTTP status
├── ArenaError        the host cannot provide the memory for the KV cache
├── TransferError     a copy of KV bytes from another host failed: they are recomputed
├── StoreError        a tier cannot be opened, so the server does not start. Later failures of a tier count as misses
├── WorkerError       a worker process could not start, or died
├── StepMemoryError   a step needs more memory than the device has free: its requests run alone or fail
└── DeviceError       a GPU failed and can no longer compute in this process: the worker ends
"""

from __future__ import annotations

_HALF_CHARS = 800
"""Characters kept at each end of a longer ModelError message."""


class BatonError(Exception):
    """An error that a user or operator can act on."""


class ConfigError(BatonError):
    """The configuration is invalid. The message has one line per problem and lists all of them."""


class ModelError(BatonError):
    """The model cannot be served. The message names an alternative."""

    def __init__(self, message: str) -> None:
        """Escape control characters and cut the middle of a long message: parts of it come from the model's files."""
        line = "".join([char if char.isprintable() else repr(char)[1:-1] for char in message])
        super().__init__(line if len(line) <= 2 * _HALF_CHARS else f"{line[:_HALF_CHARS]}...{line[-_HALF_CHARS:]}")


class RequestError(BatonError):
    """A client's request is invalid.

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
    """A copy of KV bytes from another host failed."""


class StoreError(BatonError):
    """A tier cannot be used. The message names the setting to change."""


class WorkerError(BatonError):
    """A worker process failed. The message contains the end of its output."""


class StepMemoryError(BatonError):
    """A step needs more memory than its device has free. A request that does not fit alone fails."""


class DeviceError(BatonError):
    """A GPU failed and can no longer compute in this process: the worker ends."""
