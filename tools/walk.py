"""Trace one request through a real server, from the HTTP handler to the engine's step: the files on its walk.

A profile function in the server and in its worker notes the call stack whenever a watched function is entered. The walk
is made of these stacks in order of time: from one to the next it goes back to their deepest common frame, then on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "baton"
WATCHED = {
    "decide/control/coordinator.py": "handle",
    "decide/control/transfers.py": "handle",
    "decide/kv/host_pool.py": "handle",
    "decide/policy/": "route",
    "serve/host/": "send",
    "decide/control/batcher.py": "plan",
    "compute/": "execute",
}
"""A file, or a folder that ends in /, and the function that is noted there."""
FIRST = ("serve/http/generate.py", "__call__")
"""The HTTP handler, with which a walk begins."""
LAST = "execute"
PROGRAM = """
import json, os, sys, threading, time
SOURCE, WATCHED, FOLDER = {source!r}, {watched!r}, {folder!r}
out = open(os.path.join(FOLDER, str(os.getpid())), "w")

def note(frame, event, argument):
    if event != "call":
        return
    path = frame.f_code.co_filename
    if not path.startswith(SOURCE):
        return
    path = path[len(SOURCE) + 1:]
    name = frame.f_code.co_name
    if not ((path, name) == {first!r} or any(path.startswith(p) and name == n for p, n in WATCHED)):
        return
    stack = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCE):
            stack.append((file[len(SOURCE) + 1:], frame.f_code.co_name))
        frame = frame.f_back
    out.write(json.dumps([time.monotonic(), stack[::-1]]) + "\\n")
    out.flush()

sys.setprofile(note)
threading.setprofile(note)
"""

Stack = list[tuple[str, str]]


def stacks() -> list[tuple[float, Stack]]:
    """Serve one request with the hash engine. Return every noted stack with its time, in order."""
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAM.format(source=str(SOURCE), watched=list(WATCHED.items()), folder=folder, first=FIRST)
        (Path(folder) / "sitecustomize.py").write_text(program)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([folder, str(ROOT / "src")]))
        command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--mixed", "1", "--port", "0"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
            _ask(server)
            server.terminate()
        logs = [path for path in Path(folder).iterdir() if path.name.isdigit()]
        lines = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    return sorted((at, [(file, name) for file, name in stack if not _is_entry_point(file)]) for at, stack in lines)


def _is_entry_point(file: str) -> bool:
    return file.startswith("cli/") or file.endswith("__main__.py")


def _ask(server: subprocess.Popen[str]) -> None:
    """Wait until the server is ready, send a request and read its answer."""
    url = ""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("listening on "):
            url = line.split()[2]
        if line.startswith("ready: "):
            break
    body = json.dumps({"prompt": "one two three", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        answer.read()


def walk(noted: list[tuple[float, Stack]]) -> list[str]:
    """Return the files from the HTTP handler to the first step after it, without repetitions in a row."""
    first = next(at for at, stack in noted if stack[-1] == FIRST)
    last = next(at for at, stack in noted if at > first and stack[-1][1] == LAST)
    seen: set[tuple[str, str]] = set()
    path: list[str] = []
    before: Stack = []
    for at, stack in noted:
        if not first <= at <= last or stack[-1] in seen or (stack[-1] == FIRST and at > first):
            continue
        seen.add(stack[-1])
        common = 0
        while common < min(len(stack), len(before)) and stack[common] == before[common]:
            common += 1
        for file, _ in stack[max(0, common - 1) :]:
            if not path or path[-1] != file:
                path.append(file)
        before = stack
    return path


def hops(path: list[str]) -> tuple[int, int]:
    """Return the number of files on a walk, and of returns to a file that was left before."""
    return len(set(path)), len(path) - len(set(path))


if __name__ == "__main__":
    found = walk(stacks())
    print("\n".join(found))
    print(*hops(found))
