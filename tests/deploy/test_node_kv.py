"""The DaemonSet that keeps KV on each node, and the account that finds the pods of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.cli import key_flags, serve
from baton.cli.main import build_parser
from baton.move.store.store_url import parse_store_url
from tests.deploy.cluster_tools import ClusterTools

Objects = list[dict[str, Any]]
FOLDER = "/run/baton"


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@pytest.fixture(scope="module")
def objects(tools: ClusterTools) -> Objects:
    return tools.template("nodeKv.enabled=true", "nodeKv.bytes=4e9")


def test_the_pool_shares_its_folder_and_secret_with_the_hosts_of_its_node(objects: Objects, tmp_path: Path) -> None:
    pool = one(objects, "DaemonSet", "baton-kv")["spec"]["template"]["spec"]
    host = one(objects, "Deployment", "baton-decode")["spec"]["template"]["spec"]
    (pool_container,), (host_container,) = pool["containers"], host["containers"]
    args = build_parser().parse_args(["pool", *pool_container["args"]])
    assert (str(args.socket_folder), args.bytes, args.port) == (
        FOLDER,
        4e9,
        pool_container["ports"][0]["containerPort"],
    )
    (tier,) = build_parser().parse_args(["host", *host_container["args"]]).tier
    assert tier.startswith("pool://baton-kv:8700?")
    (tmp_path / "kv-secret").write_text("0123456789abcdef" * 4)
    (tmp_path / "kv-secret").chmod(0o440)
    parse_store_url(tier.replace("/etc/baton/kv", str(tmp_path)))
    for pod, container in ((pool, pool_container), (host, host_container)):
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert volumes["kv-socket"]["hostPath"]["path"] == mounts["kv-socket"]["mountPath"] == FOLDER
        assert volumes["kv-secret"]["secret"]["items"] == [{"key": "kv-secret", "path": "kv-secret"}]
        assert mounts["kv-secret"]["mountPath"] == "/etc/baton/kv"
        assert pod["securityContext"]["runAsUser"] == 10001, "memory is lent to processes of the same user only"
    assert one(objects, "Service", "baton-kv")["spec"]["internalTrafficPolicy"] == "Local"


def test_only_the_first_step_of_the_pool_is_root(objects: Objects) -> None:
    pod = one(objects, "DaemonSet", "baton-kv")["spec"]["template"]["spec"]
    (first,), (container,) = pod["initContainers"], pod["containers"]
    assert first["command"] == ["chown", "10001:10001", FOLDER]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "runAsUser" not in container["securityContext"]


def test_no_other_pod_than_hosts_reaches_the_pool(objects: Objects) -> None:
    spec = one(objects, "NetworkPolicy", "baton-kv")["spec"]
    assert spec["podSelector"] == {
        "matchLabels": one(objects, "DaemonSet", "baton-kv")["spec"]["selector"]["matchLabels"]
    }
    ((peer,),) = (rule["from"] for rule in spec["ingress"])
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"


def test_the_chart_is_as_before_without_it(tools: ClusterTools) -> None:
    assert "kv-socket" not in json.dumps(tools.template())


def test_the_server_may_list_the_pods_of_engines_and_nothing_else(
    tools: ClusterTools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(key_flags.API_KEY, "from-the-secret")
    objects = tools.template("groups.prefill=null", "groups.decode=null", "enginePods=app=vllm")
    pod = one(objects, "Deployment", "baton")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == one(objects, "ServiceAccount", "baton")["metadata"]["name"]
    binding = one(objects, "RoleBinding", "baton")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "baton", "namespace": "llm"}]
    assert one(objects, "Role", binding["roleRef"]["name"])["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    ]
    (tmp_path / "serve.toml").write_text(one(objects, "ConfigMap", "baton-config")["data"]["serve.toml"])
    words = [word.replace("/etc/baton/config", str(tmp_path)) for word in pod["containers"][0]["args"]]
    assert serve.configuration(build_parser().parse_args(["serve", *words])).engines.pods.selector == "app=vllm"
