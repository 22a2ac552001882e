"""A storm over a live server and its hosts: mixed load of many clients, and seeded faults one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import httpx

from baton.move.clock import now_s
from tests.hosting import MendableCluster, RunningHost
from tests.machine_faults import PreloadedFaults
from tests.process.lossy_wire import ADDRESS, DIRECTIONS, LossyWire, Trouble, free_port
from tests.serving import NO_TLS, RunningServer, listening

CONFIG = """
default_class = "copied"
[[classes]]
name = "copied"
copy_tokens = 32
[survival]
silent_s = {silent_s}
attempts_max = 100
restarts_max = 1000
[hosts]
port = {hosts_port}
silent_s = 2.0
mover_silent_s = 1.0
[[tiers]]
url = "{tier}"
when = "sealed"
"""
CLIENTS = 12
SHARED = "a beginning that several requests share. " * 4
ROLES = ("prefill", "decode", "mixed")
PROMPTS = 16
HANG_UP_RATIO = 0.2
STATED = (429, 503)
"""Statuses of a refusal. It needs Retry-After and a reason in words."""
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
BLOCKS = ("--kv-blocks", "512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A cluster, and the means to break it."""

    cluster: MendableCluster
    wire: LossyWire
    preloaded: PreloadedFaults


@contextmanager
def staged(model: str, folder: Path, *arguments: str, silent_s: float = 1.0) -> Iterator[Stage]:
    """Run a server with a mixed worker, and a host with a file tier that reaches the server through a lossy wire.

    `arguments`: of the workers of both. `silent_s`: when a worker counts as hung.
    """
    config, port, preloaded = folder / "baton.toml", free_port(), PreloadedFaults(folder)
    config.write_text(
        CONFIG.format(tier=f"file://{folder / 'own'}?bytes=64e6&io=buffered", hosts_port=port, silent_s=silent_s)
    )
    server_arguments = ("--mixed", "1", "--hosts", "1", "--config", str(config), "--allowed-host", ADDRESS)
    tier = ("--tier", f"file://{folder / 'a'}?bytes=64e6&io=buffered")
    host: dict[str, Sequence[str]] = {"a": ("--prefill", "1", "--decode", "1", *tier, *BLOCKS, *arguments)}
    environment = preloaded.environment
    with listening(model, *server_arguments, *BLOCKS, *arguments, environment=environment) as server:
        wire = LossyWire(http_port=int(server.url.rpartition(":")[2]), hosts_port=port)
        made = MendableCluster(server, host, {}, url=wire.url, environment=environment)
        try:
            made.mend()
            yield Stage(cluster=made, wire=wire, preloaded=preloaded)
        finally:
            made.close()
            wire.close()


async def storm(load: Load, faults: Faults, count: int, pause_s: float, *, until_s: float = inf) -> None:
    """Play faults under load, each after every client could get an answer since the last one.

    `until_s`: the time of the last fault, if the machine is too slow for all of them.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        for _ in range(count):
            if now_s() >= until_s:
                break
            await load.wait_for(CLIENTS)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(faults.strike)
        await load.wait_for(CLIENTS)
        load.is_over = True


def known_texts(server: RunningServer, asked: Sequence[dict]) -> dict[int, str]:
    """Return the text of every request, as the calm server gives it."""
    with server.client() as client:
        answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in asked]
    return {number: answer["choices"][0]["text"] for number, answer in enumerate(answers)}


def bodies(seed: int, *, output_tokens_max: int = 300) -> list[dict]:
    """Draw requests of many lengths. Some share a beginning, some are sampled."""
    draw = random.Random(f"bodies {seed}")
    return [
        {
            "prompt": draw.choice(["", SHARED]) + f"{n} " * draw.randint(1, 60),
            "max_tokens": draw.randint(1, output_tokens_max),
            "temperature": draw.choice([0, 1]),
            "seed": n,
            "ignore_eos": True,
        }
        for n in range(PROMPTS)
    ]


@dataclass(slots=True)
class Load:
    """Clients that send requests until they are told to end, and compare each answer with its known text."""

    url: str
    texts: dict[int, str]
    bodies: Sequence[dict]
    draw: random.Random
    answered: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    is_over: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Send requests from all clients until `is_over`."""
        limits = httpx.Limits(max_connections=CLIENTS, keepalive_expiry=1.0)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, verify=NO_TLS) as client,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(CLIENTS):
                clients.create_task(self._send_all(client))

    async def wait_for(self, answers: int) -> None:
        """Wait until so many further requests have ended."""
        goal = self.answered.total() + answers
        while self.answered.total() < goal:
            self._changed.clear()
            await self._changed.wait()

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            number = self.draw.randrange(len(self.bodies))
            if self.draw.random() < HANG_UP_RATIO:
                end = await self._hang_up(client, self.bodies[number], chunks=self.draw.randint(0, 40))
            else:
                end = await self._complete(client, number, is_streamed=self.draw.random() < 0.7)
            self.answered[end] += 1
            self._changed.set()

    async def _hang_up(self, client: httpx.AsyncClient, body: dict, *, chunks: int) -> str:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                chunks -= 1
                if chunks < 0:
                    return "left"
        return "left"

    async def _complete(self, client: httpx.AsyncClient, number: int, *, is_streamed: bool) -> str:
        """Send a request and compare its text. A refusal must state its reason and when to come back."""
        body = {**self.bodies[number], "stream": is_streamed}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            content = (await response.aread()).decode()
        if response.status_code in STATED:
            if "retry-after" not in response.headers or not json.loads(content)["error"]["message"]:
                self.wrong.append(f"a refusal without a reason: {response.headers} {content}")
            return "refused"
        text = _text(content, is_streamed=is_streamed)
        if response.status_code != 200 or text != self.texts[number]:
            self.wrong.append(f"{response.status_code} for {body}: {content[-600:]}")
            return "wrong"
        return "right"


def _text(content: str, *, is_streamed: bool) -> str | None:
    """Return the text of an answer. None: it is an error, or a stream that has not ended."""
    if not is_streamed:
        return json.loads(content).get("choices", [{"text": None}])[0]["text"]
    chunks = [line[6:] for line in content.splitlines() if line.startswith("data: ")]
    if not chunks or chunks[-1] != "[DONE]" or any("error" in json.loads(chunk) for chunk in chunks[:-1]):
        return None
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in json.loads(chunk).get("choices", ()))


@dataclass(slots=True)
class Faults:
    """Faults on the processes of a cluster, and their repair."""

    cluster: MendableCluster
    wire: LossyWire
    """Between the hosts and the server."""
    preloaded: PreloadedFaults
    draw: random.Random
    seen: Counter[str] = field(default_factory=Counter[str])

    @property
    def server(self) -> RunningServer:
        return self.cluster.server

    def strike(self) -> str:
        """Play one fault. Return its name."""
        kinds: dict[str, Callable[[], None]] = {
            "worker killed": lambda: self._signal_worker(signal.SIGKILL),
            "worker stopped": lambda: self._signal_worker(signal.SIGSTOP),
            "role flipped": self._flip,
            "mover killed": lambda: self._signal_mover(signal.SIGKILL),
            "mover stopped": lambda: self._signal_mover(signal.SIGSTOP),
            "disk full": self._fill_disk,
            "host killed": lambda: self._end_host(signal.SIGKILL),
            "host left": lambda: self._end_host(signal.SIGTERM),
            "host stopped": self._stop_host,
            "message lost": lambda: self._strike_message("lost"),
            "message repeated": lambda: self._strike_message("repeated"),
            "connections cut": self.wire.cut,
            "connections delayed": lambda: self.wire.delay(self.draw.uniform(0.1, 1.0)),
            "disk slow": self._slow_disk,
            "workers restarted": self._restart,
        }
        least = min(self.seen[kind] for kind in kinds)
        kind = self.draw.choice([kind for kind in kinds if self.seen[kind] == least])
        self.seen[kind] += 1
        kinds[kind]()
        return kind

    def _signal_worker(self, number: int) -> None:
        pids = [worker["pid"] for worker in self.server.cluster()["workers"] if worker["state"] == "ready"]
        if pids:
            _kill(self.draw.choice(pids), number)

    def _flip(self) -> None:
        """Set the role of a worker. It may be lost at the same moment."""
        worker = self.draw.choice(self.server.cluster()["workers"])
        with self.server.client() as client:
            path, body = (
                f"/cluster/workers/{worker['id']}/role",
                {"role": self.draw.choice(["prefill", "decode", "mixed"])},
            )
            assert client.post(path, json=body).status_code in (200, 404)

    def _signal_mover(self, number: int) -> None:
        for pid in self._movers():
            _kill(pid, number)

    def _strike_message(self, what: Trouble) -> None:
        """Lose or repeat a control message. Only a host that has joined exchanges any."""
        self._joined_host()
        self.wire.strike(what, self.draw.choice(DIRECTIONS))

    def _joined_host(self) -> RunningHost:
        host = self.draw.choice(list(self.cluster.hosts.values()))
        self.server.wait_until(
            lambda state: host.name in {known["id"] for known in state["hosts"] if known["state"] == "ready"},
            reason="the host has joined",
        )
        return host

    def _movers(self) -> list[int]:
        """Return the mover of a host that has joined. One that starts has 30 s until it counts as hung."""
        return self._joined_host().pids("baton.serve.host.mover")

    def _fill_disk(self) -> None:
        """Let every write to a file fail, as on a full disk, until the next fault of this kind ends that."""
        for pid in self._movers():
            limits = NO_LIMIT if self.seen["disk full"] % 2 == 0 else (0, resource.RLIM_INFINITY)
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            except ProcessLookupError:
                continue

    def _restart(self) -> None:
        with self.server.client() as client:
            client.post("/cluster/restart", json={}).raise_for_status()

    def _slow_disk(self) -> None:
        """Let reads and writes of tiers take longer, some beyond their deadline, until the next fault of this kind."""
        delay_s = 0.0 if self.seen["disk slow"] % 2 == 0 else self.draw.choice([0.2, 0.5, 6.0])
        self.preloaded.delay_disk(delay_s)

    def _end_host(self, number: int) -> None:
        host = self.draw.choice(list(self.cluster.hosts.values()))
        host.process.send_signal(number)
        host.process.wait(60)
        self.cluster.mend_hosts()

    def _stop_host(self) -> None:
        """Stop an agent until the server has removed its host, then let it join again."""
        host = self.draw.choice(list(self.cluster.hosts.values()))
        host.process.send_signal(signal.SIGSTOP)
        try:
            self.server.wait_until(
                lambda state: host.name not in {known["id"] for known in state["hosts"]}, reason="the host is removed"
            )
        finally:
            host.process.send_signal(signal.SIGCONT)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # an earlier fault has ended it


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process, without the arena."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
