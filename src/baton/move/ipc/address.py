"""Network addresses in text form, with or without a port."""

from __future__ import annotations


def with_port(address: str, port: int) -> str:
    """Add a port to an address that has none: `10.0.0.1`, `::1`, `[::1]` or a name."""
    host, colon, end = address.rpartition(":")
    is_bare_v6 = address.count(":") > 1 and not address.startswith("[")
    if colon and end.isdecimal() and host and not is_bare_v6:
        return address
    return f"[{address}]:{port}" if is_bare_v6 else f"{address}:{port}"
