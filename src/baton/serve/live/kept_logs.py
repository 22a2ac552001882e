"""Keep full and earlier decision logs of a server as numbered files beside the log: `run.log.1` is the oldest."""

from __future__ import annotations

import logging
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from baton.core.errors import ConfigError

log = logging.getLogger("baton.server")


def keep_earlier_log(path: Path, kept_bytes_max: int) -> None:
    """Rename an existing log to the next free number, and delete the oldest logs beyond `kept_bytes_max` in all.

    A log that another process writes is left alone, and its size does not count. Raises ConfigError if the log cannot
    be renamed.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    target = next_kept_log(path)
    try:
        with path.open("rb") as file:
            flock(file, LOCK_EX | LOCK_NB)
            path.rename(target)
    except BlockingIOError:
        return  # opening the log for writing reports it
    except OSError as error:
        raise ConfigError(
            f"cannot keep the earlier decision log {path} as {target.name}: {error.strerror}; choose another file"
        ) from error
    delete_oldest_logs(path, kept_bytes_max)


def delete_oldest_logs(path: Path, kept_bytes_max: int) -> None:
    """Delete the oldest kept logs beyond `kept_bytes_max` in all."""
    left_bytes = kept_bytes_max
    for number, old in enumerate(reversed(kept_logs(path))):
        left_bytes -= old.stat().st_size
        if left_bytes < 0:
            old.unlink()
            log.warning("deleted the decision log %s: the %d newer ones use log_kept_bytes_max", old, number)


def next_kept_log(path: Path) -> Path:
    """Return the path with the next free number."""
    kept = kept_logs(path)
    return path.with_name(f"{path.name}.{_number(kept[-1]) + 1 if kept else 1}")


def kept_logs(path: Path) -> list[Path]:
    """Return the kept logs, the oldest first."""
    head = f"{path.name}."
    names = [other for other in path.parent.iterdir() if other.name.startswith(head)]
    return sorted((other for other in names if other.name.removeprefix(head).isdecimal()), key=_number)


def _number(path: Path) -> int:
    return int(path.suffix[1:])
