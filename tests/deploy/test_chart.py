"""The Helm chart: its objects are valid, and every flag, port, route, key and metric that it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli import key_flags, serve
from baton.cli.main import build_parser
from baton.core.config import Config
from baton.core.types import ROLES
from baton.decide.metrics import catalog
from baton.serve.http.edge import OPEN_PATHS
from tests.deploy.cluster_tools import CHART, ClusterTools

EVERYTHING = (
    "tls.secret=baton-tls", "serviceMonitor.enabled=true", "worker.autoscaling.enabled=true", "model.claim=models",
    "model.tokenSecret=hub", "keys.file=keys.json", "image.pullSecrets={registry}", "groups.long.role=mixed",
    "server.allowedHosts={llm.example.com}", "server.args={--queue-s=30}", "server.claim=state",
    "groups.long.args={--device=cuda,--tp=2}",
    r"groups.long.resources.limits.nvidia\.com/gpu=2", "groups.long.nodeSelector.gpu=h100",
)  # fmt: skip
ALONE = ("groups.prefill=null", "groups.decode=null", "server.workers.mixed=1")
ENGINES = ("groups.prefill=null", "groups.decode=null", "enginePods=app=vllm")
NODE_KV = ("nodeKv.enabled=true", "nodeKv.tolerations[0].operator=Exists", "image.pullSecrets={registry}")
VARIANTS = {
    "default": (),
    "everything": EVERYTHING,
    "alone": ALONE,
    "open": ("networkPolicy.enabled=false",),
    "engines": ENGINES,
    "node-kv": NODE_KV,
}
NOT_OF_KUBERNETES = {"ServiceMonitor"}
LONG = ("server.terminationGracePeriodSeconds=86400",)
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module", params=VARIANTS)
def objects(request: pytest.FixtureRequest, tools: ClusterTools) -> Objects:
    """The chart's objects with the values of one variant."""
    return tools.template(*VARIANTS[request.param])


def of_kind(objects: Objects, *kinds: str) -> Objects:
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, the pod and the container of each Deployment."""
    for each in of_kind(objects, "Deployment"):
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield each["metadata"]["name"], pod, container


def command_line(container: dict[str, Any]) -> list[str]:
    """Return the arguments of `baton` as the kubelet expands them."""
    program, *words = [*container["command"], *container["args"]]
    assert program == "baton"
    for name, value in (("POD_IP", "10.0.0.7"), ("POD_NAMESPACE", "llm")):
        known = any(each["name"] == name for each in container["env"])
        words = [word.replace(f"$({name})", value) if known else word for word in words]
    return words


def configuration(objects: Objects, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration that the server's container starts with. Fails as the server would."""
    monkeypatch.setenv(key_flags.API_KEY, "from-the-secret")
    (server,) = (container for _name, _pod, container in pods(objects) if container["command"][1] == "serve")
    (config,) = of_kind(objects, "ConfigMap")
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    words = [word.replace("/etc/baton/config", str(folder)) for word in command_line(server)]
    files = ("--tls-cert", "--tls-key", "--keys")  # their contents are those of secrets
    return serve.configuration(build_parser().parse_args([word for word in words if not word.startswith(files)]))


def test_helm_lint_finds_nothing(tools: ClusterTools) -> None:
    done = tools.helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


def test_every_object_follows_the_schema_of_kubernetes(objects: Objects, tools: ClusterTools) -> None:
    wrong = [text for each in objects if each["kind"] not in NOT_OF_KUBERNETES for text in tools.problems(each)]
    assert wrong == []


def test_an_unknown_field_is_found(tools: ClusterTools) -> None:
    (service, _hosts) = of_kind(tools.template(), "Service")
    assert tools.problems({**service, "spec": {**service["spec"], "portz": []}}) != []


def test_baton_takes_every_command_line(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown flags, and a configuration that the server refuses, fail here."""
    config = configuration(objects, tmp_path, monkeypatch)
    hosts = [container for _name, _pod, container in pods(objects) if container["command"][1] == "host"]
    replicas = sum(each["spec"].get("replicas", 1) for each in of_kind(objects, "Deployment")) - 1
    assert config.hosts.expected == replicas
    assert config.http.host == "0.0.0.0"
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")} - {"baton-kv"}
    assert services | {"baton.llm", "baton.llm.svc"} <= {*config.http.allowed_hosts, "baton-hosts"}
    for container in hosts:
        args = build_parser().parse_args(command_line(container))
        scheme, _, address = args.join.partition("://")
        assert address == "baton-hosts:8000"
        assert address.partition(":")[0] in config.http.allowed_hosts
        assert scheme == ("https" if any(each["name"] == "SSL_CERT_FILE" for each in container["env"]) else "http")
        assert args.listen == "[10.0.0.7]:8002"
        assert sum(getattr(args, role) or 0 for role in ROLES) == 1


def test_ports_are_those_that_baton_listens_on(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(objects, tmp_path, monkeypatch)
    for _name, _pod, container in pods(objects):
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        if container["command"][1] == "serve":
            joining = {"hosts": config.hosts.port} if config.hosts.expected else {}
            assert ports == {"http": config.http.port, **joining}
        else:
            args = build_parser().parse_args(command_line(container))
            assert ports == {"kv": int(args.listen.rpartition(":")[2])}
    named = {port["name"] for _name, _pod, container in pods(objects) for port in container["ports"]}
    named |= {"pool"} if of_kind(objects, "DaemonSet") else set()
    wanted = {port["targetPort"] for each in of_kind(objects, "Service") for port in each["spec"]["ports"]}
    for policy in of_kind(objects, "NetworkPolicy"):
        wanted |= {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert wanted <= named


def test_probes_ask_ports_and_open_routes(objects: Objects) -> None:
    """The kubelet sends no key. tests/deploy/test_rehearsal.py sends the requests to a server."""
    for _name, _pod, container in pods(objects):
        probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
        paths = {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe}
        assert paths == ({"/ui", "/ready"} if container["command"][1] == "serve" else set())
        assert paths <= OPEN_PATHS
        names = {port["name"] for port in container["ports"]}
        assert {probe[kind]["port"] for probe in probes for kind in ("httpGet", "tcpSocket") if kind in probe} <= names


def test_autoscalers_ask_for_metrics_and_labels_that_exist(tools: ClusterTools) -> None:
    objects = tools.template(*EVERYTHING)
    known = {metric.name: {label.name for label in metric.labels} for metric in catalog.METRICS}
    deployments = {each["metadata"]["name"]: each for each in of_kind(objects, "Deployment")}
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scalers} == deployments.keys() - {"baton"}
    for scaler in scalers:
        (metric,) = (each["external"]["metric"] for each in scaler["spec"]["metrics"])
        labels = metric["selector"]["matchLabels"]
        assert labels.keys() - {"service"} <= known[metric["name"]], "Prometheus adds the label service"
        assert labels["service"] == "baton"
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]["spec"]
        assert labels["role"] == target["template"]["metadata"]["labels"]["baton.dev/role"]
        assert "replicas" not in target, "an upgrade would undo the autoscaler's choice"


def test_pods_have_time_to_drain(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_s = configuration(objects, tmp_path, monkeypatch).survival.drain_s
    for _name, pod, container in pods(objects):
        _sleep, pause_s = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ("", "0"))
        assert pod["terminationGracePeriodSeconds"] >= float(pause_s) + drain_s + 15


def test_pods_run_without_privileges(objects: Objects) -> None:
    for _name, pod, container in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] == ("serviceAccountName" in pod)
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
        assert rights["capabilities"] == {"drop": ["ALL"]}
        shared = next(each for each in pod["volumes"] if each["name"] == "shared-memory")
        assert shared["emptyDir"]["medium"] == "Memory"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["volumes"]}
        assert mounts["shared-memory"] == "/dev/shm"
        assert not any("key" in word.lower() and "=/etc/" not in word for word in container["args"]), "seen by ps"


def test_variables_are_those_that_baton_reads(objects: Objects) -> None:
    known = {key_flags.API_KEY, key_flags.ADMIN_KEY, key_flags.JOIN_KEY, key_flags.ENGINE_KEY}
    for _name, _pod, container in pods(objects):
        named = {each["name"] for each in container["env"] if each["name"].startswith("BATON_")}
        assert named == (known if container["command"][1] == "serve" else {key_flags.JOIN_KEY})


def test_selectors_find_their_pods(objects: Objects) -> None:
    """A label that no pod has would leave a Service without endpoints, and a policy without effect."""
    makers = of_kind(objects, "Deployment", "DaemonSet")
    labels = [each["spec"]["template"]["metadata"]["labels"].items() for each in makers]
    found = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            found.append(spec["selector"])
        elif each["kind"] in ("Deployment", "DaemonSet", "PodDisruptionBudget"):
            found.append(spec["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy":
            found += [spec["podSelector"]["matchLabels"]]
            found += [peer["podSelector"]["matchLabels"] for rule in spec["ingress"] for peer in rule.get("from", ())]
    assert found
    assert all(any(selector.items() <= pod for pod in labels) for selector in found), found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("groups.prefill.replica=2",), "additional properties 'replica' not allowed"),
        (("groups.prefill.role=router",), "value must be one of"),
        (("serviceMonitor.enable=true",), "additional properties 'enable' not allowed"),
        (("keys.secret=",), "minLength"),
        (("groups.prefill.replicas=0", "groups.decode.replicas=0"), "there is no worker"),
        (("server.workers.mixed=1",), "server.workers and groups both have workers"),
        (("enginePods=app=vllm",), "enginePods and groups both have workers"),
        (("nodeKv.bytes=8Gi",), "does not match pattern"),
        (("server.terminationGracePeriodSeconds=35",), "more than preStopSeconds + survival.drain_s, 35 s together"),
        (("groups.decode.terminationGracePeriodSeconds=30",), "group decode must be more than survival.drain_s, 30 s"),
        (
            ("worker.autoscaling.enabled=true", "groups.more.role=decode"),
            "groups decode and more would each follow the load of the whole role decode",
        ),
    ],
)
def test_wrong_values_are_refused_with_the_reason(tools: ClusterTools, values: tuple[str, ...], message: str) -> None:
    done = tools.refused(*values)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_grace_period_is_read_from_the_configuration(tools: ClusterTools, tmp_path: Path) -> None:
    """Also if it is the default one. A comment is none."""
    values, default_s = tmp_path / "values.yaml", Config().survival.drain_s
    for text, drain_s in (("survival.drain_s = 1_000.5", 1000.5), ("# drain_s = 900", default_s), ("", default_s)):
        values.write_text(f"config: '{text}'\n")
        for more_s, code in ((0, 1), (1, 0)):
            seconds = int(drain_s) + more_s
            done = tools.refused(f"worker.terminationGracePeriodSeconds={seconds}", *LONG, values=values)
            assert done.returncode == code, (text, seconds, done.stderr)


def test_two_groups_of_a_role_scale_by_metrics_of_their_own(tools: ClusterTools) -> None:
    sets = ("worker.autoscaling.enabled=true", "groups.more.role=decode", "groups.more.autoscaling.metric=more_load")
    assert len(of_kind(tools.template(*sets), "HorizontalPodAutoscaler")) == 3


def test_names_that_look_like_numbers_stay_texts(tools: ClusterTools) -> None:
    """As a release for each day, or a group `on`: Kubernetes refuses a label that is a number or a boolean."""
    sets = "groups.on.role=mixed,worker.autoscaling.enabled=true,nodeKv.enabled=true"
    texts = "keys.secret=5,tls.secret=6,model.claim=7,model.tokenSecret=8,server.claim=9,image.pullSecrets={10}"
    arguments = (str(CHART), "--namespace", "456", "--set", sets, "--set-string", texts)
    done = tools.helm("template", "123", *arguments)
    assert done.returncode == 0, done.stderr
    assert [text for each in yaml.safe_load_all(done.stdout) for text in tools.problems(each)] == []
    done = tools.helm("template", "123", str(CHART), "--set", "enginePods=a=b,groups.prefill=null,groups.decode=null")
    assert [text for each in yaml.safe_load_all(done.stdout) for text in tools.problems(each)] == []


def test_the_alerts_find_the_job_of_every_release(tools: ClusterTools) -> None:
    """Prometheus would otherwise name the job after the Service, which has the name of the release."""
    done = tools.helm("template", "prod", str(CHART), "--set", "serviceMonitor.enabled=true,serviceMonitor.key=monitor")
    objects = list(yaml.safe_load_all(done.stdout))
    (monitor,) = (each["spec"] for each in of_kind(objects, "ServiceMonitor"))
    labels = [each["metadata"]["labels"] for each in of_kind(objects, "Service")]
    (service,) = (each for each in labels if monitor["selector"]["matchLabels"].items() <= each.items())
    alerts = (CHART.parents[1] / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r'job="([^"]*)"', alerts)) == {service[monitor["jobLabel"]]}
    assert monitor["endpoints"][0]["authorization"]["credentials"]["key"] == "monitor"


def test_a_claim_keeps_the_state_of_the_server(objects: Objects) -> None:
    claims = [
        {"/state": volume["persistentVolumeClaim"]["claimName"]}
        for _name, pod, container in pods(objects)
        for volume in pod["volumes"]
        if volume["name"] == "state" and {"name": "state", "mountPath": "/state"} in container["volumeMounts"]
    ]
    is_asked = any(each["kind"] == "Deployment" and "baton-long" in each["metadata"]["name"] for each in objects)
    assert claims == ([{"/state": "state"}] if is_asked else [])


def test_the_servers_of_another_engine_need_no_group(
    tools: ClusterTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        'config: |\n  [[engines.servers]]\n  url = "http://vllm:8000"\ngroups: {prefill: null, decode: null}\n'
    )
    objects = tools.template(values=values)
    assert len(of_kind(objects, "Deployment")) == 1
    assert [each.url for each in configuration(objects, tmp_path, monkeypatch).engines.servers] == ["http://vllm:8000"]
