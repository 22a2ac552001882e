"""`baton keys`: edit the key file of a server."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from baton.core.errors import ConfigError
from baton.core.keys import SCOPES, KeyEntry, KeyFile, KeyLimits, digest_of, read_keys
from baton.move.clock import utc_date

_KEY_BYTES = 32
_LIMITS = (
    ("--requests-per-minute", "limit of the new key"),
    ("--tokens-per-minute", "limit of prompt and output tokens"),
    ("--streams-max", "limit of requests at once"),
    ("--priority-min", "most urgent priority (default: 0)"),
    ("--kv-blocks-max", "KV blocks per host that its tenant keeps"),
)
_LIMIT_NAMES = [flag.removeprefix("--").replace("-", "_") for flag, _ in _LIMITS]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Edit the key file of `baton serve --keys FILE`: docs/security.md."
    parser.add_argument("action", choices=("add", "list", "revoke"), help="the action")
    parser.add_argument("ids", nargs="*", metavar="ID", help="keys to revoke")
    parser.add_argument("--keys", type=Path, required=True, metavar="FILE", help="the key file; add creates it")
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the new key")
    parser.add_argument(
        "--scope", action="append", choices=SCOPES, help="right of the new key (repeatable; default: generate)"
    )
    for flag, words in _LIMITS:
        parser.add_argument(flag, type=int, metavar="N", help=words)
    parser.add_argument("--classes", action="append", metavar="NAME", help="service class that it may use (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Edit or show the file. Return the exit code."""
    path = Path(os.path.realpath(args.keys))  # a symbolic link stays, and its target is replaced
    if (args.action == "revoke") != bool(args.ids):
        raise ConfigError("baton keys revoke needs the ids of keys, and the other actions take none")
    given = [name for name in ("tenant", "scope", "classes", *_LIMIT_NAMES) if vars(args)[name] is not None]
    if given and args.action != "add":
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"baton keys {args.action} makes no key, so leave out {flags}")
    if args.action == "list":
        _show(read_keys(path))
        return 0
    with _locked(path):
        file = read_keys(path) if args.action == "revoke" or path.exists() else KeyFile()
        if args.action == "add":
            key, entry = _made(args)
            _write(path, KeyFile(keys=(*file.keys, entry)))
            print(key)  # noqa: T201
            _note(f"key {entry.id} of {entry.tenant} may {', '.join(entry.scopes)}; it is not shown again")
        else:
            _write(path, _without(file, args.ids))
            _note(f"revoked {', '.join(args.ids)}")
    _note("a running server reads the file again on SIGHUP: kill -HUP PID")
    return 0


def _made(args: argparse.Namespace) -> tuple[str, KeyEntry]:
    """Return a new key and its entry for the file. Raises ConfigError with every problem of the arguments."""
    if args.tenant is None:
        raise ConfigError("baton keys add needs --tenant NAME")
    limits = {name: value for name, value in vars(args).items() if name in _LIMIT_NAMES and value is not None}
    classes = tuple(dict.fromkeys(args.classes)) if args.classes else None
    key = f"baton-{secrets.token_urlsafe(_KEY_BYTES)}"
    entry = KeyEntry(
        id=secrets.token_hex(4),
        sha256=digest_of(key.encode()),
        tenant=args.tenant,
        scopes=tuple(dict.fromkeys(args.scope or ("generate",))),
        limits=KeyLimits(**limits, classes=classes),
        created=utc_date().date().isoformat(),
    )
    if problems := KeyFile(keys=(entry,)).problems():
        raise ConfigError("\n".join(problem.removeprefix("keys[0].") for problem in problems))
    return key, entry


def _without(file: KeyFile, ids: list[str]) -> KeyFile:
    known = {key.id for key in file.keys}
    if unknown := [name for name in ids if name not in known]:
        raise ConfigError(f"there is no key {', '.join(unknown)}; there are {', '.join(sorted(known)) or 'none'}")
    return KeyFile(keys=tuple(key for key in file.keys if key.id not in ids))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the folder of the file, so that two commands do not overwrite each other's changes."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--keys {path}: {path.parent} must be a folder that exists: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, file: KeyFile) -> None:
    """Replace the file, in mode 0600. A reader sees either the old or the new content."""
    text = msgspec.json.format(msgspec.json.encode(file), indent=2)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # in mode 0600
        with os.fdopen(descriptor, "wb") as written:
            written.write(text + b"\n")
            written.flush()
            os.fsync(written.fileno())
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"--keys {path}: cannot write it: {error.strerror}") from error


def _show(file: KeyFile) -> None:
    table = Table("id", "tenant", "scopes", "limits", "created")
    for key in file.keys:
        limits = ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(key.limits).items())
        table.add_row(key.id, key.tenant, ", ".join(key.scopes), limits or "-", key.created or "-")
    Console().print(table)


def _note(text: str) -> None:
    print(f"baton keys: {text}", file=sys.stderr)  # noqa: T201
