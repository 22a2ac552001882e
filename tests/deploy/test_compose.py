"""The compose file starts what is here: flags that exist, files that exist, ports on the loopback only."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton.cli.commands import build_parser
from tests.deploy.cluster_tools import ROOT

FOLDER = ROOT / "deploy" / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, dict]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_the_server_has_a_prefill_and_a_decode_worker(services: dict[str, dict]) -> None:
    server = services["baton"]
    args = build_parser(["serve"]).parse_args(server["command"])
    assert (args.prefill, args.decode, args.host) == (1, 1, "0.0.0.0")
    assert all(port.startswith("127.0.0.1:") for port in server["ports"]), "it has no keys"
    assert (FOLDER / server["build"] / "Dockerfile").is_file()


def test_every_mounted_file_exists_and_every_image_is_pinned(services: dict[str, dict]) -> None:
    for name in ("prometheus", "grafana"):
        assert services[name]["image"].partition(":")[2][:1] in tuple("v0123456789"), "a moving tag is no pin"
        assert services[name]["network_mode"] == "service:baton"
        for volume in services[name]["volumes"]:
            assert (FOLDER / volume.partition(":")[0]).exists(), volume


def test_grafana_reads_prometheus_and_the_dashboard(services: dict[str, dict]) -> None:
    [source] = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounted = {
        inside: FOLDER / here for here, inside, _ in (each.split(":") for each in services["grafana"]["volumes"])
    }
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (mounted[provider["options"]["path"]] / home.name).is_file()
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
