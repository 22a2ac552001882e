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
    """Name of its key, never the key itself. Empty: it has none."""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset()
    limits: KeyLimits = NO_LIMITS
    priority_min: int | None = None
    """Most urgent priority that its requests may have. None: any."""
    cache_namespace: str = ""
    """Requests share cached blocks only within a namespace. Empty: the namespace of a server with a single tenant."""

    def cache_salt(self, asked: str | None) -> str:
        """Return the salt of the block hashes of a request, from the salt that the client sent.

        Clients cannot write the separator, so no salt leads into the namespace of another tenant. Raises RequestError.
        """
        if asked and _SEPARATOR in asked:
            raise RequestError("cache_salt has the character U+0000; send a text without it", param="cache_salt")
        return f"{self.cache_namespace}{_SEPARATOR}{asked or ''}" if self.cache_namespace else asked or ""

    def shares_public_prefixes(self, asked: str | None) -> bool:
        """Return whether requests may use cached blocks of public prefixes: only without a salt of the client."""
        return bool(self.cache_namespace) and not asked

    def check_priority(self, asked: int) -> int:
        """Return the priority that a client asks for. Raises RequestError (403) if it is too urgent for its key."""
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
    """A single key has every scope. Of several, each is a tenant of its own with the scope `generate`."""
    admin_key: str = ""
    """May change the cluster and join hosts to it. Empty: none."""
    join_key: str = ""
    """May join hosts. Empty: none."""
    file: Path | None = None


@dataclass(slots=True)
class Keyring:
    """Finds the identity of a request. `reload` reads the key file again."""

    sources: KeySources = KeySources()
    _known: dict[str, Identity] = field(init=False)
    """Identities by the digest of their keys."""
    _anonymous: Identity | None = field(init=False)
    """The identity of a client without a known key. None: it is refused."""

    def __post_init__(self) -> None:
        self.reload()

    @property
    def is_open(self) -> bool:
        """Clients without a key may generate."""
        return self._anonymous is not None

    def reload(self) -> None:
        """Read the key file. Raises ConfigError for an invalid one: the keys stay as they were."""
        entries = () if self.sources.file is None else read_keys(self.sources.file).keys
        self._known = _fixed_identities(self.sources) | {entry.sha256: _identity_of(entry) for entry in entries}
        self._anonymous = _anonymous_identity(self.sources)

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Return the identity of a request. Raises RequestError (401) if it needs a key and has no known one.

        Keys are found by their digest, so response times reveal nothing about a key.
        """
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        key = sent.strip() if scheme.lower() == b"bearer" else b""
        digest = digest_of(key)
        found = self._known.get(digest) if key else None
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
    """Return the identities of the keys that do not come from the key file, by digest."""
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
    """Return the identity of clients without a key. It has each scope for which the server has no key."""
    if sources.api_keys or sources.file is not None:
        return None
    taken: set[Scope] = set()
    if sources.admin_key:
        taken |= _ADMIN
    if sources.join_key:
        taken.add("join")
    return Identity(scopes=frozenset(SCOPES) - taken)


# ---- scopes


def needed_scope(method: str, path: str) -> Scope | None:
    """Return the scope that a route needs. None: any key may use it.

    Routes below `/cluster/` need `admin` unless they are named here, so that a new one is not open by mistake.
    """
    if path == "/cluster/hosts":
        return "join"
    if path.startswith("/cluster/"):
        return "admin"
    return None if method in ("GET", "HEAD", "OPTIONS") else "generate"


def check_port(method: str, path: str, port: int, admin_port: int) -> None:
    """Raise RequestError (403) for a route of the scopes `admin` and `join` at a port other than `admin_port`."""
    if port != admin_port and needed_scope(method, path) in _ADMIN:
        message = f"{path[:80]} is at the port {admin_port} of this server only (--admin-port)"
        raise RequestError(message, status=403, code="admin_port")


def check_scope(identity: Identity, method: str, path: str) -> None:
    """Raise RequestError (403, or 401 for a client without a key) if a client may not use a route."""
    scope = needed_scope(method, path)
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
