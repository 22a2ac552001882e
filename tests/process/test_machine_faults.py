"""Faults of the machine under a running server: no descriptor, no memory, another time, names that do not resolve."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.move.store.node import StoreNode
from tests.machine_faults import PreloadedFaults, limited_group
from tests.process.test_disk_faults import ask_until
from tests.process.test_hosts import LONG, ask, many, stream, text_of
from tests.process.test_tiers import BLOCKS, PROMPT, complete, wait_stored
from tests.serving import RunningServer, all_workers_ready, listening, nothing_used, serving

pytestmark = pytest.mark.deep
DAY_S = 86_400
NO_SHARED_MEMORY = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k,ro none /dev/shm && exec "$@"', "sh")
"""Runs a command with an empty, read-only /dev/shm."""


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Let a process open nothing more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))  # open descriptors above it stay open
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_without_a_file_descriptor_streams_go_on_and_new_connections_are_served_later(
    hash_server: RunningServer,
) -> None:
    with hash_server.client() as client:
        expected = text_of(ask(client, LONG))
    with serving("hash") as server, server.client() as client:
        events = stream(client, LONG)
        first = next(events)
        with without_descriptors(server.process.pid):
            waiting = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(20)]
            rest = list(events)
            text = "".join(event["choices"][0]["text"] for event in (first, *rest) if event["choices"])
            assert text == expected
            ask_until(lambda: "refused new connections for now" in server.output(), lambda: client.get("/health"))
        with server.client() as later:
            assert text_of(ask(later, LONG)) == expected
        assert server.output().count("refused new connections") == 1
        for connection in waiting:
            connection.close()
        server.wait_until(nothing_used, reason="no block is used")
        assert "Traceback" not in server.output()


def test_a_worker_that_exceeds_a_memory_limit_is_killed_and_its_request_goes_on(hash_server: RunningServer) -> None:
    """The kernel kills the process that needs the next page. Its host starts another one outside of the group."""
    body = {"prompt": "long " * 700, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with hash_server.client() as client:
        expected = text_of(ask(client, body))
    with limited_group(1 << 16) as group, serving("hash", "--mixed", "1") as server:
        (worker,) = server.worker_pids()
        (group / "cgroup.procs").write_text(str(worker))
        threads, answers = many(server, [body])
        server.wait_until(lambda state: state["workers"][0]["pid"] != worker, reason="the worker was killed")
        threads[0].join()
        assert answers == [expected]
        server.wait_output("killed by signal 9: by an operator, or by the system when memory runs out")
        server.wait_until(all_workers_ready, reason="the worker is back")


@pytest.mark.skipif(
    subprocess.run([*NO_SHARED_MEMORY, "true"], capture_output=True).returncode != 0, reason="needs mount namespaces"
)
def test_a_clock_that_jumps_changes_no_duration_and_no_deadline(hash_server: RunningServer, tmp_path: Path) -> None:
    """Forward and back by days, in the middle of a stream. The machine has no room in /dev/shm either."""
    with hash_server.client() as client:
        expected = text_of(ask(client, LONG))
    faults = PreloadedFaults(tmp_path)
    with (
        listening("hash", environment=faults.environment, inside=NO_SHARED_MEMORY) as server,
        server.client() as client,
    ):
        server.wait_ready()
        before_s = ask(client, {"prompt": "x", "max_tokens": 1})["created"]
        events = stream(client, LONG)
        seen = [next(events)]
        for offset_s in (10 * DAY_S, -10 * DAY_S, DAY_S):
            faults.move_clock(offset_s)
            seen += [next(events) for _ in range(5)]
        seen += events
        assert "".join(event["choices"][0]["text"] for event in seen if event["choices"]) == expected
        faults.move_clock(-10 * DAY_S)
        answer = ask(client, LONG)
        assert text_of(answer) == expected
        assert answer["created"] < before_s - 9 * DAY_S, "the clock has jumped"
        assert all(0 <= value < DAY_S for name, value in answer["timings"].items() if name.endswith("_s") and value)
        assert server.cluster()["workers"][0]["state"] == "ready"
        assert "is lost" not in server.output()


def test_a_name_that_does_not_resolve_costs_misses_and_holds_no_request(tmp_path: Path) -> None:
    """The pool node restarts while the resolver hangs: its blocks are computed again, and the server ends in time."""
    faults = PreloadedFaults(tmp_path)
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=8_000_000)
    tier = f"pool://localhost:{node.address.rpartition(':')[2]}"
    with serving("hash", "--mixed", "1", "--kv-blocks", "96", "--tier", tier, environment=faults.environment) as server:
        text, _ = complete(server)
        wait_stored(server, BLOCKS)
        faults.hold_names(hold=True)
        node.close()
        for number in range(4):
            complete(server, f"Prompt {number} takes the place of another one in the arena. " * 20)
        assert complete(server, PROMPT)[0] == text
        assert server.stop(signal.SIGTERM) == 0
    faults.hold_names(hold=False)
