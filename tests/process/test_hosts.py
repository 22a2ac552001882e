"""Several hosts behind one server: the same text, whatever moves between them and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.hosting import MendableCluster, cluster, joining
from tests.serving import RunningServer, alive, all_workers_ready, listening, nothing_used

PREFILL, DECODE = ("--prefill", "1"), ("--decode", "1")
LONG = {"prompt": "a request that runs for a while", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
LONGER = {**LONG, "max_tokens": 3000}
"""A request that still runs when its KV has been copied."""
PROMPT = {"prompt": "the same words again and again, " * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def ask(client: httpx.Client, body: dict) -> dict:
    return client.post("/v1/completions", json=body).raise_for_status().json()


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def stream(client: httpx.Client, body: dict, on_first: Callable[[], None] = lambda: None) -> Iterator[dict]:
    """Yield the events; `on_first` is called when the first one is there."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for number, line in enumerate(response.iter_lines()):
            if number == 0:
                on_first()
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


@pytest.fixture(scope="module")
def mixed_text(hash_server: RunningServer) -> Callable[[dict], str]:
    """What a single worker says. It is asked once for each body."""
    known: dict[str, str] = {}

    def say(body: dict) -> str:
        key = json.dumps(body)
        if key not in known:
            with hash_server.client() as client:
                known[key] = text_of(ask(client, body))
        return known[key]

    return say


FAST = "[hosts]\nsilent_s = 4.0\nmover_silent_s = 3.0\ncopy_s = 5.0\n"
"""Faults are noticed within seconds, so that a test waits for them no longer."""


@pytest.fixture(scope="module")
def pair_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decision log of the pair's server."""
    return tmp_path_factory.mktemp("pair") / "decisions.log"


@pytest.fixture(scope="module")
def mendable(pair_log: Path) -> Iterator[MendableCluster]:
    path = pair_log.with_name("baton.toml")
    path.write_text(FAST)
    with listening("hash", "--hosts", "2", "--config", str(path), "--log", str(pair_log)) as server:
        cluster = MendableCluster(server, {"a": PREFILL, "b": DECODE}, {})
        cluster.mend()
        yield cluster
        cluster.close()


@pytest.fixture
def pair(mendable: MendableCluster) -> MendableCluster:
    """Host `a` prefills, host `b` decodes. The prompts of a test that watches copies are its own: others are cached."""
    mendable.mend()
    return mendable


def test_prefill_on_one_host_and_decode_on_another_say_what_one_worker_says(pair: MendableCluster, mixed_text) -> None:
    """INV-8. The KV comes over the wire: as many bytes as the prompt's blocks have, and the metric says so."""
    server = pair.server
    moved_bytes = server.metric("baton_handoff_bytes_total")
    with server.client() as client:
        answer = ask(client, PROMPT)
        assert text_of(answer) == mixed_text(PROMPT)
        timings = answer["timings"]
        assert (timings["prefill_worker"], timings["decode_worker"]) == ("a.prefill-0", "b.decode-0")
        assert timings["handoff_s"] > 0
        blocks = -(-answer["usage"]["prompt_tokens"] // 16)
        state = server.wait_until(nothing_used, reason="no block is used")
        assert [host["state"] for host in state["hosts"]] == ["ready", "ready"]
        moved_bytes = server.metric("baton_handoff_bytes_total") - moved_bytes
        assert moved_bytes == blocks * state["hosts"][0]["kv_block_bytes"]
        assert 'host="b"' in client.get("/metrics").text


def many(server: RunningServer, bodies: list[dict]) -> tuple[list[threading.Thread], list[str]]:
    """Ask for all of them at once. The answers are there when the threads have ended."""
    answers = [""] * len(bodies)

    def one(index: int) -> None:
        with server.client() as own:
            answers[index] = text_of(ask(own, bodies[index]))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    return threads, answers


def all_ready(*names: str) -> Callable[[dict], bool]:
    return lambda state: sorted(host["id"] for host in state["hosts"] if host["state"] == "ready") == sorted(names)


NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs the extra nixl: pip install -e '.[nixl]'")


@pytest.mark.deep
@pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("nixl", marks=NIXL)])
def test_every_transport_brings_the_same_text(transport: str, tmp_path: Path, mixed_text) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(
        f"[hosts]\ntransports = ['{transport}']\nencrypt_kv = {'false' if transport == 'nixl' else 'true'}\n"
    )
    bodies = [{**PROMPT, "prompt": f"{index} {PROMPT['prompt']}"} for index in range(4)]
    with cluster("hash", {"a": PREFILL, "b": DECODE}, "--config", str(path)) as (server, _):
        threads, answers = many(server, bodies)
        for thread in threads:
            thread.join()
        assert answers == [mixed_text(body) for body in bodies]
        server.wait_until(nothing_used, reason="no block is used")
        assert server.metric("baton_handoff_bytes_total") > 0


@pytest.mark.parametrize("victim", [pytest.param("a", marks=pytest.mark.deep), "b"])
def test_a_request_outlives_the_death_of_a_host(victim: str, pair: MendableCluster, mixed_text) -> None:
    """Its workers and its KV die with its agent; the server has the tokens, and the other host goes on with them."""
    server = pair.server
    with server.client() as client:
        workers = pair.hosts[victim].pids("baton.serve.worker")
        text, last = "", {}
        for last in stream(client, LONG):
            if not text:
                pair.hosts[victim].process.kill()
            text += "".join(choice["text"] for choice in last["choices"])
        assert text == mixed_text(LONG)
        assert last["timings"]["attempts"] == (2 if victim == "b" else 1)
        state = server.wait_until(lambda c: len(c["hosts"]) == 1 and nothing_used(c), reason="one host, nothing used")
        assert victim not in {worker["host"] for worker in state["workers"]}
        assert not any(alive(pid) for pid in workers)
        pair.mend()
        assert text_of(ask(client, PROMPT)) == mixed_text(PROMPT)


def test_a_host_that_is_told_to_end_hands_its_request_over_first(pair: MendableCluster, mixed_text) -> None:
    """Its KV is copied while it decodes. Before, the other host computed all tokens again."""
    server = pair.server
    failovers, moves = server.metric("baton_failovers_total"), server.metric("baton_live_moves_total")
    with server.client() as client:
        text, is_told = "", False
        for chunk in stream(client, LONGER):
            text += "".join(choice["text"] for choice in chunk["choices"])
            if len(text) > 100 and not is_told:
                pair.hosts["b"].process.send_signal(signal.SIGTERM)
                is_told = True
        assert text == mixed_text(LONGER)
    assert pair.hosts["b"].process.wait(60) == 0
    assert server.metric("baton_live_moves_total") == moves + 1
    assert server.metric("baton_failovers_total") == failovers
    pair.mend()


def test_a_hung_agent_is_given_up_and_joins_anew(pair: MendableCluster, mixed_text) -> None:
    server, agent = pair.server, pair.hosts["b"].process
    with server.client() as client:
        text = ""
        for chunk in stream(client, LONG):
            if not text:
                agent.send_signal(signal.SIGSTOP)
            text += "".join(choice["text"] for choice in chunk["choices"])
        assert text == mixed_text(LONG)
        agent.send_signal(signal.SIGCONT)
        server.wait_until(all_ready("a", "b"), reason="the host is back")
        assert text_of(ask(client, PROMPT)) == mixed_text(PROMPT)
        server.wait_until(nothing_used, reason="no block is used")


def test_a_worker_that_dies_on_another_host_is_started_again_there(pair: MendableCluster, mixed_text) -> None:
    server = pair.server
    with server.client() as client:
        text, last = "", {}
        for last in stream(client, LONG):
            if not text:
                os.kill(pair.hosts["b"].pids("baton.serve.worker")[0], signal.SIGKILL)
            text += "".join(choice["text"] for choice in last["choices"])
        assert text == mixed_text(LONG)
        assert last["timings"]["attempts"] == 2
        server.wait_until(all_workers_ready, reason="the worker is back")
        server.wait_until(nothing_used, reason="no block is used")


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("a", signal.SIGSTOP),
        ("b", signal.SIGKILL),
        pytest.param("a", signal.SIGKILL, marks=pytest.mark.deep),
        pytest.param("b", signal.SIGSTOP, marks=pytest.mark.deep),
    ],
)
def test_requests_outlive_movers_that_die_or_hang(
    victim: str, number: signal.Signals, pair: MendableCluster, mixed_text
) -> None:
    """Under load, so that copies are under way: they end as not landed, and what they were to bring is computed."""
    own = f"{number.name} of {victim}, {PROMPT['prompt']}"
    bodies = [{**PROMPT, "prompt": f"{index} {own}" * 4, "max_tokens": 200} for index in range(8)]
    server = pair.server
    with server.client() as client:
        mover = pair.hosts[victim].mover()
        threads, answers = many(server, bodies)
        os.kill(mover, number)
        for thread in threads:
            thread.join()
        assert answers == [mixed_text(body) for body in bodies]
        server.wait_until(nothing_used, reason="no block is used")
        moved_bytes = server.metric("baton_handoff_bytes_total")
        after = {**PROMPT, "prompt": own}
        assert text_of(ask(client, after)) == mixed_text(after)
        assert not alive(mover)
        assert server.metric("baton_handoff_bytes_total") > moved_bytes, "the next mover moves nothing"


def test_the_losses_of_hosts_are_replayed_as_they_were_decided(pair: MendableCluster, pair_log: Path) -> None:
    """INV-7: hosts that join and are lost are in the log of all tests above. This test ends the pair's server."""
    with pair.server.client() as client:
        for count, _chunk in enumerate(stream(client, LONG)):
            if count == 5:
                pair.hosts["b"].process.kill()
                pair.mend_hosts()
    assert pair.server.stop() == 0, pair.server.output()
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", "replay", str(pair_log)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert "the same decisions" in done.stdout


def test_a_host_without_its_server_ends_its_workers_and_joins_the_next(mixed_text) -> None:
    """The server is killed; another one comes up at its address."""
    with listening("hash", "--hosts", "1") as first, joining(first.url, "a", "--mixed", "1") as host:
        first.wait_ready()
        workers = host.pids("baton.serve.worker")
        first.process.kill()
        first.process.wait()
        port = first.url.rpartition(":")[2]
        with listening("hash", "--hosts", "1", "--port", port) as second, second.client() as client:
            second.wait_ready()
            assert not any(alive(pid) for pid in workers)
            assert text_of(ask(client, PROMPT)) == mixed_text(PROMPT)


def test_a_role_flip_on_another_host_and_workers_of_the_servers_own(mixed_text) -> None:
    """The server's own host prefills, another decodes; then the other one does both."""
    with listening("hash", "--prefill", "1", "--hosts", "1") as server, joining(server.url, "b", *DECODE):
        server.wait_ready()
        with server.client() as client:
            first = ask(client, PROMPT)
            assert (first["timings"]["prefill_worker"], first["timings"]["decode_worker"]) == (
                "prefill-0",
                "b.decode-0",
            )
            for worker, role in (("prefill-0", "decode"), ("b.decode-0", "prefill")):
                client.post(f"/cluster/workers/{worker}/role", json={"role": role}).raise_for_status()
            other = {**PROMPT, "prompt": "something else, " * 20}
            second = ask(client, other)
            assert (second["timings"]["prefill_worker"], second["timings"]["decode_worker"]) == (
                "b.decode-0",
                "prefill-0",
            )
            assert [text_of(first), text_of(second)] == [mixed_text(PROMPT), mixed_text(other)]
        server.wait_until(nothing_used, reason="no block is used")


def test_a_prefix_comes_from_the_host_that_has_it(mixed_text) -> None:
    """A worker that computes no more prompts has the prefix: another host fetches it. A drained host sends it."""
    body = {**PROMPT, "prompt": "a long story. " * 100}
    follow_up = {**body, "prompt": body["prompt"] + "And then? " * 160}  # mostly new
    mixed = ("--mixed", "1")
    with cluster("hash", {"a": mixed, "b": mixed}) as (server, hosts), server.client() as client:
        first = ask(client, body)
        holder = first["timings"]["prefill_worker"]
        client.post(f"/cluster/workers/{holder}/role", json={"role": "decode"}).raise_for_status()
        moved_bytes = server.metric("baton_handoff_bytes_total")
        second = ask(client, follow_up)
        assert second["timings"]["prefill_worker"] != holder
        assert second["timings"]["cached_tokens"] > 1000
        assert server.metric("baton_handoff_bytes_total") > moved_bytes
        assert [text_of(first), text_of(second)] == [mixed_text(body), mixed_text(follow_up)]
        server.wait_until(nothing_used, reason="no block is used")
        tale = {**body, "prompt": "another tale. " * 200}
        leaver = ask(client, tale)["timings"]["prefill_worker"].partition(".")[0]
        assert hosts[leaver].process.poll() is None
        client.post(f"/cluster/hosts/{leaver}/drain", json={}).raise_for_status()
        assert hosts[leaver].process.wait(60) == 0
        third = ask(client, {**tale, "prompt": tale["prompt"] + "And then?"})
        assert third["timings"]["cached_tokens"] > 2000
        server.wait_until(nothing_used, reason="no block is used")


@pytest.mark.deep
def test_the_real_model_over_two_hosts_says_what_it_says_on_one(smollm_server: RunningServer) -> None:
    """INV-8 with weights. Greedy and drawn; the long prompt goes over layer by layer."""
    items = " ".join(f"item {index}" for index in range(120))
    bodies = [
        {"prompt": f"A list: {items}", "max_tokens": 24, "temperature": 0},
        {"prompt": "A list of rivers in Europe:", "max_tokens": 24, "temperature": 0},
        {"prompt": "Once upon a time, in a small village, ", "max_tokens": 24, "temperature": 0.9, "seed": 7},
    ]
    with smollm_server.client() as client:
        expected = [text_of(ask(client, body)) for body in bodies]
    given = ("--dtype", "float32")
    with cluster("smollm2-135m", {"a": PREFILL, "b": DECODE}, *given) as (server, _), server.client() as client:
        assert [text_of(ask(client, body)) for body in bodies] == expected
        assert server.metric("baton_handoff_bytes_total") > 0
        assert server.metric("baton_handoff_layer_bytes_total") > 0


SCALING = '''
from pathlib import Path


class AsWritten:
    """As many decode workers as stand in the file beside this one."""

    def target(self, cluster, history, cost, now_s):
        return {"decode": int(Path(__file__).with_name("wanted").read_text())}
'''


def test_scaling_starts_and_ends_workers_on_another_host(tmp_path: Path, mixed_text) -> None:
    (tmp_path / "scaling.py").write_text(SCALING)
    wanted = tmp_path / "wanted"
    wanted.write_text("1")
    config = tmp_path / "baton.toml"
    config.write_text("tick_s = 0.1\n[policy.scaling]\nuse = 'scaling:AsWritten'\n")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    arguments = ("hash", "--prefill", "1", "--hosts", "1", "--config", str(config))
    with (  # a machine of two cores has room for one worker more
        listening(*arguments, environment={"PYTHONPATH": path}) as server,
        joining(server.url, "a", *DECODE, "--threads", "1") as host,
    ):
        server.wait_ready()

        def decoding(count: int) -> Callable[[dict], bool]:
            return lambda state: [w["state"] for w in state["workers"] if w["role"] == "decode"] == ["ready"] * count

        wanted.write_text("2")
        state = server.wait_until(decoding(2), reason="a worker more")
        assert "decode-added-1" in {worker["id"] for worker in state["workers"]}
        assert len(host.pids("baton.serve.worker")) == 2
        wanted.write_text("1")
        server.wait_until(decoding(1), reason="a worker less")
        with server.client() as client:
            assert text_of(ask(client, PROMPT)) == mixed_text(PROMPT)


def test_what_decodes_on_mixed_workers_moves_between_hosts_and_says_the_same(
    mixed_text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-8, live: a policy sends every request that decodes to the other host, at every tick. Bytes go over TCP."""
    folder = Path(__file__).parents[2] / "examples" / "policies"
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{folder}")
    config = tmp_path / "moving.toml"
    config.write_text(
        "tick_s = 0.05\n[hosts]\ntransports = ['tcp']\n[policy.moves]\nuse = 'back_and_forth:BackAndForth'\n"
    )
    hosts, moves = dict.fromkeys("ab", ("--mixed", "1")), 0
    with cluster("hash", hosts, "--config", str(config)) as (server, _), server.client(timeout_s=240) as client:
        for body in [{**LONG, "prompt": f"request {number}"} for number in range(20)]:
            answer = ask(client, body)
            assert text_of(answer) == mixed_text(body)
            assert answer["timings"]["attempts"] == 1, "nobody died"
            moves += answer["timings"].get("moves", 0)
            if moves:  # on a busy machine, a request may end before its KV has been copied
                break
        assert server.metric("baton_live_moves_total") == moves > 0
        assert server.metric("baton_failovers_total") == 0
        assert server.metric("baton_handoff_bytes_total") > 0
        server.wait_until(nothing_used, reason="no block is used")
