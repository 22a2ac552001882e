"""The SLO of a request: in headers, in the body, or the server's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.core.errors import RequestError
from baton.core.types import Slo
from baton.serve.http.slo import asked_slo, header_slo
from baton.serve.http.wire.schemas import SLO_S_MAX, SloFields

BODY = {"prompt": "a", "max_tokens": 2}
USUAL = Slo(ttft_s=2.0, tpot_s=0.2)
NONE = SloFields()


def test_headers_are_milliseconds() -> None:
    asked = header_slo({b"x-slo-ttft-ms": b"500", b"x-slo-tpot-ms": b"12.5"})
    assert (asked.ttft_s, asked.tpot_s) == (0.5, 0.0125)
    assert header_slo({}) == NONE


@pytest.mark.parametrize("sent", [b"0", b"-5", b"soon", b"nan", b"inf", b"1e12", b"", b"\xff"])
def test_a_bad_header_is_a_400_that_says_what_to_send(sent: bytes) -> None:
    with pytest.raises(RequestError, match=r"x-slo-ttft-ms is .* send milliseconds above 0") as raised:
        header_slo({b"x-slo-ttft-ms": sent})
    assert raised.value.status == 400


def test_a_missing_target_is_the_usual_one_or_one_that_cannot_be_missed() -> None:
    ttft = SloFields(ttft_s=0.5)
    assert asked_slo(NONE, None, None) is None
    assert asked_slo(NONE, None, USUAL) == USUAL
    assert asked_slo(NONE, ttft, USUAL) == Slo(ttft_s=0.5, tpot_s=USUAL.tpot_s)
    assert asked_slo(ttft, None, None) == Slo(ttft_s=0.5, tpot_s=SLO_S_MAX)
    assert asked_slo(ttft, SloFields(tpot_s=0.05), None) == Slo(ttft_s=0.5, tpot_s=0.05)


def test_header_and_body_must_agree() -> None:
    assert asked_slo(SloFields(ttft_s=0.5), SloFields(ttft_s=0.5), USUAL) is not None
    with pytest.raises(RequestError, match=r"x-slo-ttft-ms asks for 0.5 s and slo.ttft_s for 1 s; send one of them"):
        asked_slo(SloFields(ttft_s=0.5), SloFields(ttft_s=1.0), USUAL)


def test_the_slo_of_a_body_is_checked(build: Callable, serve: Callable) -> None:
    client = serve(build())
    body = BODY | {"slo": {"ttft_s": 5.0, "tpot_s": 1.0}}
    assert client.post("/v1/completions", json=body).status_code == 200
    refused = client.post("/v1/completions", json=BODY | {"slo": {"ttft_s": 0}})
    assert refused.status_code == 400
    assert "slo.ttft_s" in refused.text
    refused = client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "100"})
    assert refused.status_code == 400
    assert "send one of them" in refused.text
