"""`baton restart` at a URL where another program answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.cli.main import main


class Page(BaseHTTPRequestHandler):
    """Answers everything with a web page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("flags", [[], ["--hosts"]])
def test_another_program_at_the_url_is_said_in_a_line(
    url: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restart", "--url", url, *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"baton: there is no Baton server at {url}: JSON is malformed")
    assert said.count("\n") == 1
