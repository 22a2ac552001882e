"""The tests of openai-python's own API, unchanged, against a real server. Names of failures are compared."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.clients.environments import CACHE, Environment, installed
from tests.serving import RunningServer, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
VERSION = "3.54.0"
FILES = (
    "test_models.py",
    "test_completions.py",
    "chat",
    "test_responses.py",
    "responses",
    "test_embeddings.py",
    "test_files.py",
    "test_batches.py",
)
PASSED_MIN = 498
"""Of 652: each of the tests runs with four or five clients. Three more skip themselves."""
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "gpt-4o-mini", "text-embedding-3-small", "model")
"""Models that the tests name."""

EXPECTED = {
    "test_models.*_delete": "deletes a fine-tuned model",
    "chat.completions.test_messages.*_list": "its types allow only messages of the assistant",
    "chat.test_completions.test_method_create_with_all_params*": "asks for audio, moderation and a web search",
    "test_completions.test_method_create_with_all_params*": "best_of is 0, and logit_bias names the token `foo`",
    "test_responses.test_*_create_overload_*": "has neither input nor an earlier response",
    "test_responses.test_method_create_with_all_params*": "runs in the background, in a stored conversation",
    "test_responses.*_cancel": "only responses in the background can be cancelled",
    "test_responses.*_compact*": "compaction of conversations",
    "responses.test_input_tokens.*_count": "has neither input nor an earlier response",
    "responses.test_input_tokens.test_method_count_with_all_params": "truncates the input",
    "test_embeddings.*_create": "asks for base64, and its strict validation then refuses text",
}
"""Tests that fail, by a pattern of their names: products of OpenAI, and values that only its mock takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    names = [word for model in MODELS for word in ("--served-name", model)]
    with serving("hash", *names) as running:
        yield running


@pytest.fixture(scope="module")
def environment() -> Environment:
    packages = ("pytest", "pytest-asyncio", "rich", "httpx2", "inline-snapshot")
    return installed(f"openai-{VERSION}", f"openai[aiohttp]=={VERSION}", *packages)


@pytest.fixture(scope="module")
def suite(environment: Environment) -> Path:
    """The sources of the library, with its tests."""
    folder = CACHE / f"openai-{VERSION}-source"
    if not folder.exists():
        download = ["python", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai"]
        done = environment.run(*download, f"openai=={VERSION}", "--dest", environment.folder)
        if done.returncode:
            pytest.skip(f"pip cannot download the sources of openai: {done.stderr.strip()[-200:]}")
        with tarfile.open(environment.folder / f"openai-{VERSION}.tar.gz") as archive:
            archive.extractall(environment.folder, filter="data")
        shutil.move(environment.folder / f"openai-{VERSION}", folder)
    return folder


def test_only_named_tests_fail(server: RunningServer, environment: Environment, suite: Path, tmp_path: Path) -> None:
    files, report = [f"tests/api_resources/{name}" for name in FILES], tmp_path / "report.xml"
    environment.run(
        "python", "-m", "pytest", "--override-ini=addopts=", "-q", "-p", "openai_ids", f"--junitxml={report}", *files,
        variables={"TEST_API_BASE_URL": f"{server.url}/v1", "PYTHONPATH": str(Path(__file__).parent)}, cwd=suite,
    )  # fmt: skip
    failed = list(failures(report))
    unnamed = [f"{name}: {message}" for name, message in failed if not any(fnmatch(name, each) for each in EXPECTED)]
    assert not unnamed, "\n".join(unnamed)
    assert sum(len(case) == 0 for case in ElementTree.parse(report).iter("testcase")) >= PASSED_MIN
    passing = [each for each in EXPECTED if not any(fnmatch(name, each) for name, _ in failed)]
    assert not passing, f"these pass by now: {passing}"


def failures(report: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each failed test, as `chat.test_completions.test_method_list`, with its message."""
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            folder = case.get("classname", "").removeprefix("tests.api_resources.").rpartition(".")[0]
            name = case.get("name", "").partition("[")[0]
            yield f"{folder}.{name}", problem.get("message", "")[:300]
