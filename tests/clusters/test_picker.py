"""The endpoint picker: which servers requests get, as the proxy would ask, and the decisions of its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from baton.core.config import Config
from baton.core.errors import RequestError
from baton.core.types import HostId, Role
from baton.integrations.engines.port import EngineLoad
from baton.integrations.gateway.asked import read_request, without_topology
from baton.integrations.gateway.build import build_picker
from baton.integrations.gateway.endpoint import Endpoint
from baton.integrations.gateway.picker import Pick, Picker
from baton.move.clock import now_s
from baton.serve.http.wire.schemas import UNSUPPORTED
from tests.command_line import baton

FIRST, SECOND, THIRD = "127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"
IDLE = EngineLoad(kv_tokens=65536)
LONG = "tell me more about it. " * 200


def chat(text: str, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


class Asker:
    """Asks a picker as the stream of a proxy would."""

    def __init__(self, roles: Mapping[str, str], config: Config | None = None) -> None:
        self.picker: Picker = build_picker(config or Config())
        self._number = 0
        for address, role in roles.items():
            self.picker.join(address, msgspec.convert(role, Role), IDLE)

    def ask(self, body: bytes, headers: Mapping[bytes, bytes] | None = None, hosts: tuple[str, ...] = ()) -> Pick:
        self._number += 1
        allowed = tuple(map(HostId, hosts))
        return self.picker.arrive(read_request(self._number, headers or {}, body, allowed, now_s()))

    def answer(self, pick: Pick) -> None:
        self.picker.begin(pick, is_first_token=True)
        self.picker.end(pick, output_tokens=8, is_complete=True)

    def address(self, pick: Pick) -> str:
        return self.picker.addresses(pick)[0]


def in_loop(play: Callable[[], None]) -> None:
    """Run in an event loop, in which a picker lives."""

    async def run() -> None:
        play()

    asyncio.run(run())


def mixed(*addresses: str) -> dict[str, str]:
    return dict.fromkeys(addresses, "mixed")


def test_a_conversation_goes_on_where_its_prompt_is_cached() -> None:
    """The first two requests go to different servers; the next turn of the second one finds its own again."""

    def play() -> None:
        asker = Asker(mixed(FIRST, SECOND))
        picks = [asker.ask(chat(f"{number} {LONG}")) for number in (1, 2)]
        assert {asker.address(pick) for pick in picks} == {FIRST, SECOND}
        for pick in picks:
            asker.answer(pick)
        for number, pick in ((2, picks[1]), (1, picks[0])):
            turn = json.loads(chat(f"{number} {LONG}"))
            turn["messages"] += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
            again = asker.ask(json.dumps(turn).encode())
            assert asker.address(again) == asker.address(pick)
            assert again.new_tokens < picks[1].new_tokens / 2
            asker.answer(again)

    in_loop(play)


def test_a_model_and_a_salt_of_its_own_share_no_prefix() -> None:
    def blocks(**fields: object) -> tuple[bytes, ...]:
        return read_request(1, {}, chat(LONG, **fields), (), 0.0).block_hashes

    same = blocks()
    assert blocks() == same != ()
    for other in (blocks(model="adapter"), blocks(cache_salt="tenant")):
        assert not {*other} & {*same}


def test_a_deep_body_is_read_as_empty_and_refused_if_it_names_a_topology_field() -> None:
    deep = b'{"messages": ' + b"[" * 100_000
    assert read_request(1, {}, deep, (), 0.0).prompt_tokens == 1
    assert without_topology(deep) == deep
    with pytest.raises(RequestError, match="send fewer levels"):
        without_topology(b'{"kv_transfer_params": ' + b"[" * 100_000)


def test_requests_of_other_clients_count_as_load() -> None:
    def play() -> None:
        asker = Asker(mixed(FIRST, SECOND))
        asker.picker.report(FIRST, EngineLoad(running_requests=8, waiting_requests=8, kv_tokens=65536))
        assert [asker.address(asker.ask(chat(f"{number} {LONG}"))) for number in range(3)] == [SECOND] * 3

    in_loop(play)


def test_the_own_requests_in_the_metrics_are_no_load_of_others() -> None:
    endpoint = Endpoint(FIRST, "mixed", IDLE)
    requests = [read_request(number, {}, chat("hi"), (), 0.0) for number in range(3)]
    for request in requests:
        endpoint.start(request, 100)
    endpoint.leave(requests[0].id)
    endpoint.note_load(EngineLoad(running_requests=3))  # of the time before the last one left
    assert endpoint.view(0.0).others is None
    endpoint.note_load(EngineLoad(running_requests=3))
    others = endpoint.view(0.0).others
    assert others is not None
    assert others.requests == 1


def test_a_prompt_gets_a_pair_of_servers_where_roles_are_apart() -> None:
    """The proxy sends the request to the decode server, whose header names the one that computes the prompt."""

    def play() -> None:
        asker = Asker({FIRST: "prefill", SECOND: "decode", THIRD: "decode"})
        pick = asker.ask(chat(LONG))
        assert asker.address(pick) in (SECOND, THIRD)
        assert FIRST not in asker.picker.addresses(pick)
        assert asker.picker.prefiller(pick) == FIRST
        asker.answer(pick)
        assert asker.picker.cluster.coordinator.live_requests == 0

    in_loop(play)


@pytest.mark.parametrize("lost", [None, FIRST, SECOND])
def test_the_end_of_an_answer_closes_its_request(lost: str | None) -> None:
    """Also if its begin was not seen, and if the server of a pair is lost meanwhile."""

    def play() -> None:
        asker = Asker({FIRST: "prefill", SECOND: "decode"})
        for has_begun in (True, False):
            pick = asker.ask(chat(LONG))
            if has_begun:
                asker.picker.begin(pick, is_first_token=True)
            if lost in asker.picker.endpoints:
                asker.picker.lose(lost, "it is gone")
            asker.picker.end(pick, output_tokens=8, is_complete=True)
            assert asker.picker.cluster.coordinator.live_requests == 0
            assert not any(each.running_requests for each in asker.picker.endpoints.values())

    in_loop(play)


def test_a_late_request_is_refused_with_the_time_to_wait() -> None:
    def play() -> None:
        asker = Asker(mixed(FIRST))
        running = asker.ask(chat("a" * 400_000))
        pick = asker.ask(chat("b" * 400_000), {b"x-llm-d-slo-ttft-ms": b"200"})
        assert pick.refusal is not None
        assert (pick.refusal.status, pick.refusal.code) == (429, "slo")
        assert (pick.refusal.retry_after_s or 0) >= 1
        asker.answer(running)
        asker.picker.end(pick, output_tokens=0, is_complete=False)
        assert asker.picker.cluster.coordinator.live_requests == 0

    in_loop(play)


@pytest.mark.parametrize("hosts", [(), (SECOND,)])
def test_a_request_that_no_server_may_take_is_refused_at_once(hosts: tuple[str, ...]) -> None:
    def play() -> None:
        asker = Asker(mixed(FIRST) if hosts else {})
        pick = asker.ask(chat("hi"), hosts=hosts)
        assert pick.refusal is not None
        assert (pick.refusal.status, pick.refusal.code) == (503, "no_worker")

    in_loop(play)


def test_only_the_servers_that_the_proxy_allows_are_picked() -> None:
    def play() -> None:
        asker = Asker(mixed(FIRST, SECOND, THIRD))
        warm = asker.ask(chat(LONG), hosts=(FIRST,))
        asker.answer(warm)
        pick = asker.ask(chat(LONG), hosts=(SECOND, THIRD))
        assert {*asker.picker.addresses(pick)} == {SECOND, THIRD}

    in_loop(play)


def test_requests_of_a_lost_server_end_once() -> None:
    """Their answers may still come, from the server to which the proxy has retried them."""

    def play() -> None:
        asker = Asker(mixed(FIRST, SECOND))
        picks = [asker.ask(chat(f"{number} {LONG}")) for number in range(4)]
        asker.picker.lose(FIRST, "it is gone")
        asker.picker.lose(SECOND, "it is gone")
        asker.picker.join(THIRD, "mixed", IDLE)
        for pick in picks:
            asker.answer(pick)
        assert asker.picker.cluster.coordinator.live_requests == 0
        assert asker.picker.endpoints[THIRD].running_requests == 0

    in_loop(play)


def test_a_retried_request_raises_suspicion_and_warms_the_other_cache() -> None:
    def play() -> None:
        asker = Asker(mixed(FIRST, SECOND))
        pick = asker.ask(chat(LONG))
        picked, other = asker.picker.addresses(pick)
        asker.picker.note_served(pick, other)
        assert asker.picker.endpoints[picked].suspected.is_set()
        assert not asker.picker.endpoints[other].suspected.is_set()
        held_tokens = asker.picker.cluster.pools[HostId(other)].held_tokens(pick.request.block_hashes)
        assert held_tokens > 0

    in_loop(play)


def test_first_tokens_correct_the_predictions() -> None:
    """A server that is 10 times as slow as predicted is predicted so after some answers, and forgotten when idle."""
    endpoint = Endpoint(FIRST, "mixed", IDLE)
    for _ in range(40):
        prices = endpoint.view(0.0).prices
        endpoint.learn(0.1 * (prices.speed if prices is not None else 1.0), 1.0)
    prices = endpoint.view(0.0).prices
    assert prices is not None
    assert prices.speed == pytest.approx(10, rel=0.05)
    for _ in range(200):
        endpoint.note_load(IDLE)
    prices = endpoint.view(0.0).prices
    assert prices is not None
    assert prices.speed == pytest.approx(1, rel=0.05)


def test_fields_that_steer_engines_are_removed() -> None:
    kept = chat("hi", max_tokens=3)
    sent = chat("hi", max_tokens=3, kv_transfer_params={"remote_host": "10.0.0.9"}, bootstrap_room=7)
    assert json.loads(without_topology(sent)) == json.loads(kept)
    steering = [name for name, reason in UNSUPPORTED.items() if reason == UNSUPPORTED["bootstrap_host"]]
    assert len(steering) > 5
    assert json.loads(without_topology(chat("hi", max_tokens=3, **dict.fromkeys(steering, 1)))) == json.loads(kept)
    assert without_topology(kept) == kept
    quoted = chat("what is kv_transfer_params?")
    assert without_topology(quoted) == quoted
    xargs = chat("hi", vllm_xargs={"kv_transfer_params": "x", "other": 1})
    assert json.loads(without_topology(xargs)) == {**json.loads(chat("hi")), "vllm_xargs": {"other": 1}}


STEERING = json.dumps({"prompt": "hi", "kv_transfer_params": {"remote_host": "10.0.0.9"}})


@pytest.mark.parametrize(
    "body",
    [
        STEERING.replace("_transfer", r"\u005ftransfer").encode(),
        STEERING.replace("}}", '}, "temperature": NaN}').encode(),
        STEERING.encode("utf-16"),
        STEERING.encode("utf-16-be"),
        STEERING.encode("utf-32"),
        STEERING.encode("utf-8-sig"),
    ],
)
def test_such_fields_are_found_however_they_are_written(body: bytes) -> None:
    """Engines read bodies with Python's `json`, which takes more than the standard."""
    assert "kv_transfer_params" in json.loads(body)
    kept = json.loads(without_topology(body))
    assert kept["prompt"] == "hi"
    assert "kv_transfer_params" not in kept


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": 3}', b'{"messages": "hi", "max_tokens": -1}'])
def test_a_body_that_is_not_understood_is_left_to_the_server(body: bytes) -> None:
    assert read_request(1, {}, body, (), 0.0).prompt_tokens >= 1


def test_an_slo_that_is_no_number_is_refused() -> None:
    with pytest.raises(RequestError, match="x-slo-ttft-ms is 'soon'"):
        read_request(1, {b"x-llm-d-slo-ttft-ms": b"soon"}, b"", (), 0.0)


def test_the_log_repeats_and_explains_the_decisions(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def play() -> None:
        asker = Asker({FIRST: "prefill", SECOND: "decode", THIRD: "mixed"}, Config(log=str(log)))
        for number in range(12):
            pick = asker.ask(chat(f"{number % 3} {LONG}"), {b"x-request-id": f"request-{number}".encode()})
            if number == 7:
                asker.picker.lose(THIRD, "it is gone")
            if number != 9:
                asker.answer(pick)
        asker.picker.close()

    in_loop(play)
    done = baton("replay", str(log))
    assert (done.returncode, "the same decisions" in done.stdout) == (0, True), done.stderr
    done = baton("explain", "request-5", "--log", str(log))
    assert done.returncode == 0, done.stderr
    assert any(address in done.stdout for address in (FIRST, THIRD))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the pool has no server"),
        (("--engine-url", "http://gpu-7:8000"), "write http://IP:PORT"),
        (("--engine-url", "https://10.0.0.7:8000"), "its scheme is https"),
        (("--engine-url", "http://10.0.0.7:8000", "--pool", "llm/pool"), "leave one of them out"),
        (("--engine-url", "http://10.0.0.7:8000", "--host", "0.0.0.0"), "--insecure"),
        (("--pool", "llm"), "write NAMESPACE/NAME"),
        (("--pool", "llm/pool"), "needs a pod with a service account"),
        (("--engine-url", "http://10.0.0.7:8000", "--tls-cert", "cert.pem"), "give both or none"),
    ],
)
def test_wrong_arguments_say_what_to_write(arguments: tuple[str, ...], said: str) -> None:
    done = baton("picker", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
