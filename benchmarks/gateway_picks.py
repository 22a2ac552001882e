"""Picks per second of `baton picker` on one core: a gRPC client asks as Envoy's ext_proc filter does.

`python benchmarks/gateway_picks.py` needs the extra `gateway` and two cores: the picker has the first one alone. Each
request has a chat of several turns, one of many, and a short streamed answer. The CPU time of a pick includes the
stream of its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import record
from aiohttp import web

from baton.integrations.gateway.messages import SERVICE, message_classes

SERVERS = 4
METRICS = (
    'vllm:num_requests_running{model_name="m"} 0.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'
    'vllm:kv_cache_usage_perc{model_name="m"} 0.1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="16384"} 1.0\n'
)
GRPC, FIRST_PORT = "127.0.0.1:19402", 19410


@dataclass
class Client:
    """Asks for picks, a fixed number at once."""

    stub: Any
    made: Callable[..., Any]
    """Makes a message to the picker from its fields."""
    bodies: Sequence[bytes]
    picks: int
    picks_s: list[float] = field(default_factory=list)
    refused: int = 0

    async def run(self, at_once: int) -> None:
        numbers = iter(range(self.picks))

        async def work() -> None:
            for number in numbers:
                await self._pick(self.bodies[number % len(self.bodies)])

        await asyncio.gather(*(work() for _ in range(at_once)))

    async def _pick(self, body: bytes) -> None:
        begun_s, stream = time.perf_counter(), self.stub()
        headers = [{"key": key, "raw_value": value} for key, value in ((":method", b"POST"), ("x-request-id", b"r"))]
        first = self.made(request_headers={"headers": {"headers": headers}})
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = 4
        await stream.write(first)
        await stream.write(self.made(request_body={"body": body, "end_of_stream": True}))
        reply = await stream.read()
        self.picks_s.append(time.perf_counter() - begun_s)
        if reply.HasField("immediate_response"):
            self.refused += 1
            stream.cancel()
            return
        await stream.read()
        answer = [{"key": ":status", "raw_value": b"200"}, {"key": "content-type", "raw_value": b"text/event-stream"}]
        await stream.write(self.made(response_headers={"headers": {"headers": answer}}))
        await stream.read()
        await stream.write(self.made(response_body={"body": b"data: [DONE]\n\n", "end_of_stream": True}))
        await stream.read()
        await stream.done_writing()
        await stream.read()


def chats(prompt_bytes: int, count: int = 512) -> list[bytes]:
    """Return requests of `count` conversations, which share a system prompt."""
    system = {"role": "system", "content": "You are helpful. " * 30}
    texts = [f"{number} " + "and then he said " * (prompt_bytes // 17) for number in range(count)]
    return [
        json.dumps({"model": "m", "stream": True, "messages": [system, {"role": "user", "content": text}]}).encode()
        for text in texts
    ]


async def serve_metrics() -> list[web.AppRunner]:
    """Start the pool: servers that only have a health and metrics."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    runners: list[web.AppRunner] = []
    for number in range(SERVERS):
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", FIRST_PORT + number).start()
        runners.append(runner)
    return runners


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace, pid: int) -> dict[str, object]:
    runners, messages = await serve_metrics(), message_classes()
    async with grpc.aio.insecure_channel(GRPC) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        stub = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=messages["ProcessingResponse"].FromString,
        )
        bodies = chats(args.prompt_bytes)
        await Client(stub, messages["ProcessingRequest"], bodies, args.picks // 4).run(args.at_once)
        client, before_s, begun_s = (
            Client(stub, messages["ProcessingRequest"], bodies, args.picks),
            cpu_s(pid),
            time.perf_counter(),
        )
        await client.run(args.at_once)
        wall_s, used_s = time.perf_counter() - begun_s, cpu_s(pid) - before_s
    for runner in runners:
        await runner.cleanup()
    ordered = sorted(client.picks_s)
    return {
        "picks": args.picks,
        "refused": client.refused,
        "servers": SERVERS,
        "at_once": args.at_once,
        "prompt_bytes": args.prompt_bytes,
        "picks_per_s": round(args.picks / wall_s),
        "picks_per_cpu_s": round(args.picks / used_s),
        "pick_s": {"p50": round(ordered[len(ordered) // 2], 5), "p99": round(ordered[len(ordered) * 99 // 100], 5)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picks", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "baton.cli.main", "picker", "--port", GRPC.rpartition(":")[2]]
    command += [f"--engine-url=http://127.0.0.1:{FIRST_PORT + number}" for number in range(SERVERS)]
    picker = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        os.sched_setaffinity(picker.pid, cores[:1])
        os.sched_setaffinity(0, cores[1:] or cores)
        result = asyncio.run(measure(args, picker.pid))
    finally:
        picker.send_signal(signal.SIGTERM)
        picker.wait(30)
    record.write("gateway-picks", {"what": "picks of one picker on one core", **result})


if __name__ == "__main__":
    main()
