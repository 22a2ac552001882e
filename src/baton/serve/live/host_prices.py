"""Whether a host that joins expects its steps to take what this server believes of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.types import HostId

FACTOR_MAX = 2.0
"""Prices nearer to each other are alike: they are rates of other machines anyway, and err by a third."""


def mispriced(
    host: HostId, prices: Mapping[str, float], *, believed: Mapping[str, Any], given: Mapping[str, Any]
) -> str:
    """Say which prices of a host are others than this server's, and how to set them. Empty: none are.

    prices: seconds by the keys of the linear cost model, for the host's own device. believed: what this server decides
    by. given: what its configuration says itself, which nobody guessed and so nothing is said about.
    """
    if given.get("model", "linear") != "linear" or "kinds" in given:
        return ""
    pairs = {key: (price, believed[key]) for key, price in prices.items() if key not in given and key in believed}
    wrong = {key: pair for key, pair in pairs.items() if max(pair) > FACTOR_MAX * min(pair)}
    if not wrong:
        return ""
    others = ", ".join(f"{key} {theirs:.3g}, not {ours:.3g}" for key, (theirs, ours) in wrong.items())
    section = ", ".join(f"{key} = {theirs:.4g}" for key, (theirs, _) in pairs.items())
    return (
        f"{host} expects other prices of its steps than this server has guessed for its own device: {others}; requests "
        f"are taken and routed by the server's. If most workers are like those of {host}, start it with cost = "
        f"{{ {section} }} in its configuration"
    )
