"""API keys as the server knows them: hashes with a tenant, scopes and limits. Keys themselves are never stored."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import in_file, keys_of
from baton.core.validation import Range, out_of_range, type_problems

Scope = Literal["generate", "admin", "join"]
"""`generate`: use the model. `admin`: change the cluster and read its log. `join`: become a host of the cluster."""
SCOPES: tuple[Scope, ...] = ("generate", "admin", "join")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
SECRET_BYTES_MIN = 32
NAME_RULE = "must have 1 to 64 letters, digits, dots, - and _"
_OTHERS = stat.S_IWGRP | stat.S_IRWXO
"""Permissions that a file with secrets must not grant: write to its group, and any to other users."""
Limit = Annotated[int, Range(least=1, most=2**31)]


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one key. None: the server's default."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt tokens and output tokens together."""
    streams_max: Limit | None = None
    """Maximum requests at once, streams or not."""
    priority_min: Annotated[int, Range(least=-(2**31), most=2**31 - 1)] | None = None
    """Lowest (most urgent) `priority` that its requests may have. None: 0."""
    classes: tuple[str, ...] | None = None
    """Service classes that its requests may have. None: the routes' choice without headers, and less urgent ones."""
    kv_blocks_max: Limit | None = None
    """Quota of KV blocks on each host, cached ones included. All keys of the tenant share the largest."""


class KeyEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of a key file."""

    id: str
    """Name of the key, for lists and to revoke it. It is not secret."""
    sha256: str
    """Digest of the key, in hexadecimal digits."""
    tenant: str
    """Keys of one tenant share cached prefixes, fair shares and quotas."""
    scopes: tuple[Scope, ...] = ("generate",)
    limits: KeyLimits = KeyLimits()
    created: str = ""
    """Date of creation."""


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a key file (JSON)."""

    keys: tuple[KeyEntry, ...] = ()

    def problems(self) -> list[str]:
        """Return every problem of the entries. Empty: the file can be used."""
        found = out_of_range(self)
        counts = Counter([f"id {key.id}" for key in self.keys] + [f"sha256 {key.sha256}" for key in self.keys])
        found += [f"{count} keys have the {value}; revoke all but one" for value, count in counts.items() if count > 1]
        for number, key in enumerate(self.keys):
            place = f"keys[{number}]"
            if _DIGEST.fullmatch(key.sha256) is None:
                found.append(f"{place}.sha256 must have 64 hexadecimal digits; write keys with `baton keys add`")
            if NAME.fullmatch(key.id) is None:  # a client with an empty id counts as one without a key
                found.append(f"{place}.id is {key.id[:80]!r}, but {NAME_RULE}")
            if NAME.fullmatch(key.tenant) is None:
                found.append(f"{place}.tenant is {key.tenant[:80]!r}, but {NAME_RULE}")
            if not key.scopes:
                found.append(f"{place}.scopes is empty, but must have one of {', '.join(SCOPES)}")
        return found


def digest_of(key: bytes) -> str:
    """Return the digest under which a key is stored.

    One round of SHA-256 is enough: keys of 256 random bits cannot be guessed, so a slow hash would add nothing.
    """
    return sha256(key).hexdigest()


def parse_keys(text: str) -> KeyFile:
    """Decode and check a key file. Raise ConfigError with every problem, one per line."""
    raw = keys_of(text, "json", example='{"keys": []}')
    problems = type_problems(raw, KeyFile)
    if not problems:
        file = msgspec.convert(raw, KeyFile)
        problems = file.problems()
        if not problems:
            return file
    raise ConfigError("\n".join(problems))


def read_keys(path: Path) -> KeyFile:
    """Read a key file. Raise ConfigError if it is invalid or readable by others."""
    with in_file(path, "the key file"):
        return parse_keys(read_secret(path))


def read_shared_secret(path: Path) -> bytes:
    """Read the secret that the machines of a cluster share. Raise ConfigError for a secret that could be guessed."""
    with in_file(path, "the secret"):
        secret = read_secret(path).strip().encode()
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"it has {len(secret)} characters, but must have {SECRET_BYTES_MIN} or more: "
                f"write it with `openssl rand -hex 32 > {path}`"
            )
        return secret


def read_secret(path: Path) -> str:
    """Return the text of a file with secrets.

    Raise OSError if the file cannot be read, ConfigError if users other than its owner could read or change it.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS:
            raise ConfigError(f"its mode is {mode:04o}, so other users can read or change it: run chmod 600 {path}")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"it belongs to user {status.st_uid}, not to the user of this process or root: chown it")
        return file.read().decode("utf-8")
