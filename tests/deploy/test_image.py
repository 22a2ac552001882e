"""The Dockerfile: linted, with the sources that it copies, and the user and ports of the chart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.cluster_tools import ROOT, ClusterTools


@pytest.fixture(scope="module")
def stages() -> list[list[str]]:
    """The instructions of each stage."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text().replace("\\\n", " "), flags=re.MULTILINE)
    return [stage.splitlines() for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]]


def given(stage: list[str], word: str) -> list[str]:
    return [line.partition(" ")[2] for line in stage if line.startswith(f"{word} ")]


def test_hadolint_finds_nothing(tools: ClusterTools) -> None:
    done = tools.hadolint(ROOT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_last_stage_has_no_compiler_and_its_own_user(stages: list[list[str]], tools: ClusterTools) -> None:
    build, last = stages
    (base, built) = (given(stage, "FROM")[0].split()[0] for stage in stages)
    assert base == built, "libraries are cached under the version of the C library"
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", base), "a moving tag is no pin"
    assert given(build, "COPY")
    assert given(last, "RUN") == []
    pods = [each["spec"]["template"]["spec"] for each in tools.template() if each["kind"] == "Deployment"]
    users = {f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" for pod in pods}
    assert set(given(last, "USER")) == users
    assert all(f"--chown={user} /opt/baton-cache" in " ".join(given(last, "COPY")) for user in users)
    ports = {str(port["containerPort"]) for pod in pods for each in pod["containers"] for port in each["ports"]}
    assert set(given(last, "EXPOSE")[0].split()) == ports


def test_copied_files_exist_and_are_sent_to_the_build(stages: list[list[str]]) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in given(stages[0], "COPY") for word in line.split()[:-1]]
    assert sorted(copied) == sorted(sent)
    assert all(Path(ROOT / name).exists() for name in copied)
