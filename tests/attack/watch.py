"""Another client's streams beside an attack: they do not stand still, and their text stays the same."""

from __future__ import annotations

import json
import threading
import time

import httpx

from tests.serving import RunningServer

STILL_S = 1.0
"""Longest pause that an attack may cause in another client's stream."""
BODY = {"prompt": "another client", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 7}
ADDRESS = "127.0.0.2"
"""The attacks come from 127.0.0.1 and may use up the limits of their address."""


class Watch:
    """Reads a stream of the attacked server, and one of a server that nothing attacks, again and again.

    The second one shows the pauses that the machine makes.
    """

    def __init__(self, attacked: RunningServer, control: RunningServer) -> None:
        self._attacked, self._control = Reader(attacked), Reader(control)

    def __enter__(self) -> Watch:
        for reader in (self._attacked, self._control):
            reader.thread.start()
        for reader in (self._attacked, self._control):
            reader.begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for reader in (self._attacked, self._control):
            reader.ending.set()
        for reader in (self._attacked, self._control):
            reader.thread.join()

    def check(self) -> None:
        """Fail if the stream stood still, changed its text or broke. The pauses of the machine are allowed for."""
        pause_s, machine_s = self._attacked.pause_s, self._control.pause_s
        assert not self._attacked.problem, self._attacked.problem
        assert pause_s <= STILL_S + 2 * machine_s, (
            f"a stream stood still for {pause_s:.2f} s, and that of a server without an attack for {machine_s:.2f} s"
        )


class Reader:
    """Reads one stream after the other in a thread, and notes the longest pause between two of its events."""

    def __init__(self, server: RunningServer) -> None:
        self.thread = threading.Thread(target=self._read_all)
        self.begun = threading.Event()
        """Set by the first event of a stream, or by a problem."""
        self.ending = threading.Event()
        self.problem = ""
        self.pause_s = 0.0
        transport = httpx.HTTPTransport(local_address=ADDRESS)
        self._client = httpx.Client(base_url=server.url, timeout=60, transport=transport)
        self._expected = ""

    def _read_all(self) -> None:
        try:
            with self._client:
                while not self.ending.is_set():
                    text = self._read()
                    self._expected = max(self._expected, text, key=len)
                    if not self._expected.startswith(text):
                        self.problem = f"the text of {len(text)} characters has changed"
        except (httpx.HTTPError, AssertionError) as error:
            self.problem = f"the stream broke: {type(error).__name__}: {error}"
        finally:
            self.begun.set()

    def _read(self) -> str:
        """Read one stream, to its end or to the first event after the attack. Return its text."""
        parts: list[str] = []
        last_s = None
        with self._client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            assert response.status_code == 200, f"status {response.status_code}"
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.perf_counter()
                self.pause_s = max(self.pause_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
                event = json.loads(line[6:])
                assert "error" not in event, line
                parts.append(event["choices"][0]["text"])
                self.begun.set()
                if self.ending.is_set():
                    break
        return "".join(parts)
