"""Each optional part costs nothing until it is used, says how to install what it needs, and has a page to try it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
OTHER_EXTRAS = {"hub", "forecast", "triton", "nixl", "redis", "s3", "otel", "node", "dev"}
"""Extras of other packages than `baton.integrations`."""
FOREIGN = {
    "baton.integrations.lmcache.connector",
    "baton.integrations.ray.host_actor",
    "baton.integrations.vllm.block_copies",
    "baton.integrations.vllm.connector",
}
"""Modules that vLLM, LMCache or Ray load in their own processes, with packages of theirs."""
HEAVY = {"etcd3", "grpc", "kubernetes", "lmcache", "sglang", "torch", "transformers", "vllm"}
"""Packages that no module of ours may import before use, beside those of the extras."""
SHAPE = "examples/shapes/llama-3.1-8b"
EVENTS = """
[[engines.servers]]
url = "http://127.0.0.1:9"
engine = "{engine}"
kv_events = "tcp://127.0.0.1:9"
"""
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = any(name == each or name.startswith(each + ".") for each in HIDDEN)
        return None if is_hidden else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
"""`sitecustomize.py` of a child and of its children: the packages are not installed there."""
COMMANDS = (
    r"^(?:[A-Z_]+=\S+ )*(?:baton|pip|vllm|sglang|llama-server|ray|envoy|mooncake_\w+|docker|kubectl|helm|sudo|setsid) "
)


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional part, and a command that uses it."""

    modules: tuple[str, ...]
    page: str
    command: str
    """`CONFIG` stands for a file with `config`."""
    config: str = ""


EXTRAS = {
    "vllm": Extra(("zmq",), "vllm", "serve hash --port 0 --config CONFIG", EVENTS.format(engine="vllm")),
    "sglang": Extra(("zmq",), "sglang", "serve hash --port 0 --config CONFIG", EVENTS.format(engine="sglang")),
    "ray": Extra(("ray",), "ray", "serve hash --port 0 --launcher ray --mixed 1"),
    "keda": Extra(("hpack", "google.protobuf"), "kubernetes", "keda --port 26379"),
    "gateway": Extra(("hpack", "google.protobuf"), "gateway", "picker --port 26380 --engine-url http://127.0.0.1:9"),
    "mooncake": Extra(("mooncake",), "mooncake", "serve hash --port 0 --mixed 1 --tier mooncake://127.0.0.1:9"),
}


def run(folder: Path, *words: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python in a process to which some packages are not installed."""
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def test_every_extra_is_known_here(root: Path) -> None:
    """A new extra is held to these rules, or has a reason not to be."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(EXTRAS) | OTHER_EXTRAS


def test_no_integration_imports_a_heavy_package_before_it_is_used(root: Path, tmp_path: Path) -> None:
    """Each module is imported by itself, where neither its extra nor anything else optional is installed."""
    files = (root / "src" / "baton" / "integrations").rglob("*.py")
    names = {".".join(file.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert names > FOREIGN
    hidden = tuple(sorted(HEAVY | {module for extra in EXTRAS.values() for module in extra.modules}))
    code = f"import importlib\nfor name in {sorted(names - FOREIGN)}:\n    importlib.import_module(name)"
    done = run(tmp_path, "-c", code, hidden=hidden)
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_no_integration_before_it_is_used(tmp_path: Path) -> None:
    code = (
        "import sys, baton.cli.main, baton.cli.serve\n"
        "print([name for name in sys.modules if name.startswith('baton.integrations.')])"
    )
    done = run(tmp_path, "-c", code)
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(name: str, tmp_path: Path) -> None:
    """By the first command that needs it, in one line, and with the exit code of a wrong setting."""
    extra = EXTRAS[name]
    (tmp_path / "baton.toml").write_text(extra.config)
    words = extra.command.replace("CONFIG", str(tmp_path / "baton.toml")).split()
    done = run(tmp_path, "-m", "baton.cli.main", *words, hidden=extra.modules)
    told = [line for line in done.stderr.splitlines() if "pip install" in line and f"'baton[{name}]'" in line]
    assert len(told) == 1, done.stderr
    assert any(module.rpartition(".")[2] in told[0].lower() for module in extra.modules), "it says what is missing"
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, done.stderr


def test_servers_without_their_extra_start_and_the_missing_package_is_named(tmp_path: Path) -> None:
    """They serve without KV events. The program of the engine is missing as well, so this command ends."""
    words = f"serve {SHAPE} --load-format dummy --port 0 --engine vllm --engine-command no-such-program".split()
    done = run(tmp_path, "-m", "baton.cli.main", *words, hidden=("zmq",))
    assert "pyzmq is not installed: pip install 'baton[vllm]'" in done.stdout
    assert (done.returncode, "no program 'no-such-program'" in done.stderr) == (2, True)


def sections(page: Path) -> dict[str, str]:
    """Return the text under each heading of a page."""
    parts = re.split(r"^##+ +(.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(text: str) -> list[str]:
    """Return the commands in the code blocks of a text; a line may have several."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part.partition("  #")[0].strip() for line in lines for part in re.split(r" &&? ?", line)]
    return [part for part in parts if re.match(COMMANDS, f"{part} ")]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_has_commands_to_try_it_and_the_versions_that_were_run(page: Path) -> None:
    """Its commands of `baton` are such as the command line takes."""
    found = sections(page)
    tried = [text for heading, text in found.items() if heading.startswith(("To try", "To save"))]
    given = [command for text in tried for command in commands(text)]
    assert len(given) >= 2, given
    for command in given:
        program, *words = shlex.split(command)
        if program == "baton":
            build_parser().parse_args([word for word in words if not word.startswith(">")])
    assert re.search(r"Tested|Checked|Written for", found["Versions"])
    assert re.search(r"\d\.\d", found["Versions"]), "it names the versions"


@pytest.mark.parametrize("name", EXTRAS)
def test_the_page_of_an_extra_says_how_to_install_it(name: str) -> None:
    page = ROOT / "docs" / "integrations" / f"{EXTRAS[name].page}.md"
    assert f"'baton[{name}]'" in page.read_text()
