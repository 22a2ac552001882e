"""The SLO that a client asks for, in headers or in the body."""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.errors import RequestError
from baton.core.types import Slo
from baton.serve.http.wire.schemas import SLO_S_MAX, SloFields

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"


def header_slo(headers: Mapping[bytes, bytes]) -> SloFields:
    """Return the SLO in the headers of a request, in seconds. Raises RequestError (400) for an invalid number."""
    return SloFields(ttft_s=_header_s(headers, TTFT_HEADER), tpot_s=_header_s(headers, TPOT_HEADER))


def _header_s(headers: Mapping[bytes, bytes], name: str) -> float | None:
    sent = headers.get(name.encode())
    if sent is None:
        return None
    try:
        value_s = float(sent) / 1e3
    except ValueError:
        value_s = 0.0
    if not 0 < value_s <= SLO_S_MAX:
        said = sent[:32].decode("latin-1")
        message = (
            f"the header {name} is {said!r}: send milliseconds above 0, at most {SLO_S_MAX * 1e3:.0f}, such as 500"
        )
        raise RequestError(message, param=name)
    return value_s


def asked_slo(headers: SloFields, body: SloFields | None, usual: Slo | None) -> Slo | None:
    """Return the SLO of a request, or None if it has none. Raises RequestError (400) if headers and body differ.

    `usual`: default SLO. It supplies a target that the client leaves out; without it, that target is one day.
    """
    body = body or SloFields()
    ttft_s = _agreed_s(headers.ttft_s, body.ttft_s, TTFT_HEADER, "slo.ttft_s")
    tpot_s = _agreed_s(headers.tpot_s, body.tpot_s, TPOT_HEADER, "slo.tpot_s")
    if ttft_s is None and tpot_s is None:
        return usual
    usual = usual or Slo(ttft_s=SLO_S_MAX, tpot_s=SLO_S_MAX)
    return Slo(
        ttft_s=usual.ttft_s if ttft_s is None else ttft_s,
        tpot_s=usual.tpot_s if tpot_s is None else tpot_s,
    )


def _agreed_s(header_s: float | None, body_s: float | None, header: str, param: str) -> float | None:
    if header_s is not None and body_s is not None and header_s != body_s:
        message = f"the header {header} asks for {header_s:g} s and {param} for {body_s:g} s; send one of them"
        raise RequestError(message, param=param)
    return body_s if header_s is None else header_s
