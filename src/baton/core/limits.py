"""The section `limits` of the configuration: bounds on what clients can make the server hold."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from baton.core.validation import Range

TimeoutSeconds = Annotated[float, Range(least=0.1, most=86400)]
Rate = Annotated[int, Range(least=0, most=2**40)]


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of connections and clients; see docs/operations.md."""

    header_bytes_max: Annotated[int, Range(least=1024, most=2**24)] = 32 * 1024
    """Maximum bytes of a request's headers."""
    headers_max: Annotated[int, Range(least=8, most=2**16)] = 100
    """Maximum headers of a request."""
    header_s: TimeoutSeconds = 10.0
    """Deadline for a request's headers, and for a TLS handshake."""
    body_s: TimeoutSeconds = 60.0
    """Deadline for a request's body, after its headers."""
    idle_s: TimeoutSeconds = 30.0
    """Maximum time without a request."""
    send_s: TimeoutSeconds = 60.0
    """Maximum time in which a client reads nothing."""
    connections_max: Annotated[int, Range(least=1, most=2**20)] = 4096
    """Maximum connections. Fewer if the system allows fewer open files."""
    address_connections_max: Annotated[int, Range(least=1, most=2**20)] = 1024
    """Maximum connections of one address, or of one /64 network of IPv6."""
    body_bytes_max: Annotated[int, Range(least=1024, most=2**40)] = 256 * 1024 * 1024
    """Maximum bytes of all request bodies in memory."""
    queue_s: Annotated[float, Range(least=0, most=86400)] = 10.0
    """Maximum wait for a request's first step, unless its SLO's TTFT is shorter. 0: no limit."""
    client_body_bytes_max: Annotated[int, Range(least=1024, most=2**40)] = 64 * 1024 * 1024
    """Maximum bytes of one client's request bodies in memory."""
    client_requests_max: Annotated[int, Range(least=1, most=2**20)] = 512
    """Maximum requests of one client at once, streams included."""
    client_requests_per_minute: Rate = 0
    """Maximum requests of one client per minute. 0: no limit."""
    client_tokens_per_minute: Rate = 0
    """Maximum prompt and output tokens, counted when a request ends. 0: no limit."""
