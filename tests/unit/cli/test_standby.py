"""A standby pair's active member ends its server before its lease may expire, whatever hangs."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from baton.cli.standby import _Standby
from baton.move.etcd import Etcd

TTL_S = 3
_ANSWERS: dict[str, dict[str, Any]] = {
    "/v3/lease/grant": {"ID": "1"},
    "/v3/kv/txn": {"succeeded": True},
    "/v3/lease/keepalive": {"result": {"TTL": str(TTL_S)}},
}


class _Etcd(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.dumps(_ANSWERS.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *args: Any) -> None:
        pass


def test_the_server_is_killed_while_the_look_up_of_etcds_name_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, hangs, goes_on, find = [0], threading.Event(), threading.Event(), socket.getaddrinfo

    def find_slowly(*args: Any, **kwargs: Any) -> Any:
        asked[0] += 1
        if asked[0] > 3:  # after the lease, its key and a renewal
            hangs.set()
            goes_on.wait()
        return find(*args, **kwargs)

    with HTTPServer(("127.0.0.1", 0), _Etcd) as etcd, socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=etcd.serve_forever)
        answering.start()
        connect = f"import socket; socket.create_connection({listener.getsockname()!r}).recv(1)"
        client = Etcd(f"http://localhost:{etcd.server_port}", timeout_s=TTL_S / 12)
        standby = _Standby(client, "key", "http://here", TTL_S, [sys.executable, "-c", connect])
        monkeypatch.setattr(socket, "getaddrinfo", find_slowly)
        running = threading.Thread(target=standby.run)
        running.start()
        try:
            server, _ = listener.accept()
            assert hangs.wait(60)
            server.settimeout(60)
            assert server.recv(1) == b"", "the server ends"
        finally:
            standby.stop()
            goes_on.set()
            running.join(60)
            etcd.shutdown()
            answering.join()
        server.close()
