"""The chart's command lines, run as processes of this machine: the pods of a release without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.cluster_tools import ClusterTools
from tests.hosting import joining
from tests.serving import NO_TLS, RunningServer, listening

JOIN_KEY, API_KEY = "key-of-hosts", "key-of-clients"
OF_A_POD = ("--port", "--hosts-port", "--join", "--listen")
"""Flags whose addresses are those of a pod of its own."""
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def words(container: dict[str, Any], folder: Path) -> list[str]:
    """Return the arguments after the command, without addresses, with the configuration in a folder."""
    found = [word.replace("/etc/baton/config", str(folder)) for word in container["args"]]
    return [word.replace("$(POD_NAMESPACE)", "llm") for word in found if not word.startswith(OF_A_POD)]


@pytest.fixture(scope="module")
def release(tools: ClusterTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict]]:
    """A server and its hosts, with small arenas; and the server's container."""
    folder = tmp_path_factory.mktemp("release")
    objects = tools.template("model.name=hash", "worker.args={--kv-blocks=512,--threads=1}")
    containers = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in objects
        if each["kind"] == "Deployment"
    }
    for each in objects:
        for name, text in each.get("data", {}).items():
            (folder / name).write_text(text)
    server = containers.pop("baton")
    model, *flags = words(server, folder)
    keys = {"BATON_API_KEY": API_KEY, "BATON_JOIN_KEY": JOIN_KEY}
    with ExitStack() as stack:
        running = stack.enter_context(listening(model, *flags, environment=keys))
        url = f"http://127.0.0.1:{running.url.rpartition(':')[2]}"
        running.url = url
        assert [probe(url, server, name) for name in PROBES] == [200, 200, 503], "alive, but not ready without hosts"
        for name, container in containers.items():
            told = words(container, folder)
            stack.enter_context(joining(url, name, *told, environment={"BATON_JOIN_KEY": JOIN_KEY}))
        running.wait_ready()
        yield running, server


def probe(url: str, container: dict[str, Any], name: str) -> int:
    return httpx.get(url + container[name]["httpGet"]["path"], verify=NO_TLS).status_code


def test_a_release_serves_under_the_names_of_its_services(release: tuple[RunningServer, dict]) -> None:
    """Each Deployment's host joins with the key of its secret; a client has its own key."""
    server, container = release
    assert [probe(server.url, container, name) for name in PROBES] == [200, 200, 200]
    for host in ("baton", "baton.llm", "baton.llm.svc"):
        headers = {"host": f"{host}:8000", "authorization": f"Bearer {API_KEY}"}
        body = {"model": "hash", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, verify=NO_TLS, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    foreign = httpx.get(f"{server.url}/ui", headers={"host": "other:8000"}, verify=NO_TLS)
    assert foreign.status_code == 403


def test_prometheus_finds_the_metrics_of_the_autoscalers(
    release: tuple[RunningServer, dict], tools: ClusterTools
) -> None:
    """With the key of the ServiceMonitor, at its path; the series have the labels that the autoscalers select."""
    server, _container = release
    objects = tools.template("serviceMonitor.enabled=true", "worker.autoscaling.enabled=true")
    (monitor,) = (each["spec"] for each in objects if each["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["endpoints"]
    assert endpoint["authorization"]["credentials"]["key"] == "api-key"
    headers = {"authorization": f"Bearer {API_KEY}"}
    answer = httpx.get(server.url + endpoint["path"], headers=headers, verify=NO_TLS)
    assert answer.status_code == 200
    for scaler in (each["spec"] for each in objects if each["kind"] == "HorizontalPodAutoscaler"):
        metric = scaler["metrics"][0]["external"]["metric"]
        role = f'role="{metric["selector"]["matchLabels"]["role"]}"'
        series = [line for line in answer.text.splitlines() if line.startswith(f"{metric['name']}{{")]
        assert any(role in line for line in series), metric
