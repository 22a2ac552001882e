"""The identities of clients: the tenant, scopes and limits of the API key that a request carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import RequestError
from baton.core.keys import SCOPES, KeyEntry, KeyLimits, Scope, digest_of, read_keys

NO_LIMITS = KeyLimits()
_SEPARATOR = "\0"
_ADMIN: frozenset[Scope] = frozenset({"admin", "join"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The rights of a client."""

    key: str = ""
    """Name of the client's key, never the key itself. Empty: the client has no key."""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset()
    limits: KeyLimits = NO_LIMITS
    priority_min: int | None = None
    """Smallest (most urgent) priority that the client's requests may have. None: there is no limit."""
    cache_namespace: str = ""
    """Requests share cached blocks only within one namespace. Empty: the server does not separate tenants."""

    def cache_salt(self, asked: str | None) -> str:
        """Return the salt of a request's block hashes: the client's namespace and the salt that it sent.

        Raises RequestError if `asked` has the separator, with which it could name the namespace of another tenant.
        """
        if asked and _SEPARATOR in asked:
            raise RequestError("cache_salt has the character U+0000; send a text without it", param="cache_salt")
        return f"{self.cache_namespace}{_SEPARATOR}{asked or ''}" if self.cache_namespace else asked or ""

    def shares_public_prefixes(self, asked: str | None) -> bool:
        """Return whether a request shares cached blocks of public prefixes. A request with its own salt does not."""
        return bool(self.cache_namespace) and not asked

    def check_priority(self, asked: int) -> int:
        """Return `asked`, a request's priority. Raises RequestError (403) if it is too urgent for the client's key."""
        if self.priority_min is None or asked >= self.priority_min:
            return asked
        raise RequestError(
            f"priority is {asked}, but the key {self.key} allows {self.priority_min} and above (lower is more urgent);"
            " its priority_min in the key file allows more",
            param="priority",
            status=403,
            code="priority_not_allowed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """The keys of a server: from its configuration and its key file."""

    api_keys: Sequence[str] = ()
    """Each is a tenant with the scope `generate`. One without `admin_key` and `file` has every scope."""
    admin_key: str = ""
    """Key with the scopes `admin` and `join`. Empty: there is none."""
    join_key: str = ""
    """Key with the scope `join`. Empty: there is none."""
    file: Path | None = None


@dataclass(slots=True)
class Keyring:
    """Finds the identity of a request by its API key."""

    sources: KeySources = KeySources()
    _known: dict[str, Identity] = field(init=False)
    """Identities by the digest of their keys."""
    _anonymous: Identity | None = field(init=False)
    """Identity of requests without a known key. None: they are refused."""

    def __post_init__(self) -> None:
        self.reload()

    @property
    def is_open(self) -> bool:
        """True if clients may generate without a key."""
        return self._anonymous is not None

    def reload(self) -> None:
        """Read the key file again. Raises ConfigError, and changes no key, if the file is invalid."""
        entries = () if self.sources.file is None else read_keys(self.sources.file).keys
        self._known = _fixed_identities(self.sources) | {entry.sha256: _identity_of(entry) for entry in entries}
        self._anonymous = _anonymous_identity(self.sources)

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Return the identity of a request. Raises RequestError (401) if a key is required and its key is unknown.

        The key is a bearer token, or as Anthropic's clients send it, the header `x-api-key`.

        Keys are looked up by their digest, so that response times reveal nothing about a key.
        """
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        key = sent.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
        found = self._known.get(digest_of(key)) if key else None
        if found is not None:
            return found
        if self._anonymous is not None:
            return self._anonymous
        if key:
            raise RequestError("the API key is not known to this server", status=401, code="invalid_api_key")
        raise RequestError(
            "send your API key in the header: Authorization: Bearer <key>", status=401, code="missing_api_key"
        )


def _fixed_identities(sources: KeySources) -> dict[str, Identity]:
    """Return the identities of all keys outside of the key file, by the digest of the key."""
    keys = sources.api_keys
    is_alone = len(keys) == 1 and not sources.admin_key and sources.file is None
    one_tenant = len(keys) == 1 and sources.file is None
    known: dict[str, Identity] = {}
    for number, key in enumerate(keys):
        digest = digest_of(key.encode())
        known[digest] = Identity(
            key=f"key-{number}",
            tenant=f"key-{number}",
            scopes=frozenset(SCOPES if is_alone else ("generate",)),
            priority_min=None if one_tenant else 0,
            cache_namespace="" if one_tenant else f"key:{digest}",
        )
    for name, key, scopes in (("join-key", sources.join_key, {"join"}), ("admin-key", sources.admin_key, _ADMIN)):
        if key:
            known[digest_of(key.encode())] = Identity(key=name, tenant=name, scopes=frozenset(scopes))
    return known


def _identity_of(entry: KeyEntry) -> Identity:
    return Identity(
        key=entry.id,
        tenant=entry.tenant,
        scopes=frozenset(entry.scopes),
        limits=entry.limits,
        priority_min=entry.limits.priority_min or 0,
        cache_namespace=f"tenant:{entry.tenant}",
    )


def _anonymous_identity(sources: KeySources) -> Identity | None:
    """Return the identity of clients without a key: the scopes that no key protects. None: a key is required."""
    if sources.api_keys or sources.file is not None:
        return None
    taken: set[Scope] = set()
    if sources.admin_key:
        taken |= _ADMIN
    if sources.join_key:
        taken.add("join")
    return Identity(scopes=frozenset(SCOPES) - taken)


# ---- scopes


LOAD_ADAPTER_PATH = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH = "/v1/unload_lora_adapter"


def needed_scope(method: str, path: str) -> Scope | None:
    """Return the scope that a route needs. None: any key may use it.

    Routes below `/cluster/` need `admin` unless this function names them, so that new routes are protected.
    """
    if path == "/cluster/hosts":
        return "join"
    if path.startswith(("/cluster/", LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH)):
        return "admin"
    return None if method in ("GET", "HEAD", "OPTIONS") else "generate"


def check_port(needed: Scope | None, path: str, port: int, admin_port: int) -> None:
    """Raise RequestError (403) if a route of the scope `admin` or `join` is used at another port than `admin_port`."""
    if port != admin_port and needed in _ADMIN:
        message = f"{path[:80]} is at the port {admin_port} of this server only (--admin-port)"
        raise RequestError(message, status=403, code="admin_port")


def check_scope(identity: Identity, scope: Scope | None, path: str) -> None:
    """Raise RequestError (403, or 401 for a client without a key) if a client may not use a route of this scope."""
    if scope is None or scope in identity.scopes:
        return
    if not identity.key:
        message = f"{path[:80]} needs a key with the scope {scope!r}; send it as Authorization: Bearer <key>"
        raise RequestError(message, status=401, code="missing_api_key")
    has = ", ".join(sorted(identity.scopes)) or "none"
    other = "the server's --admin-key or " if scope in _ADMIN else ""
    raise RequestError(
        f"{path[:80]} needs a key with the scope {scope!r}, this key has {has}; "
        f"use {other}a key of `baton keys add --scope {scope}`",
        status=403,
        code="missing_scope",
    )
