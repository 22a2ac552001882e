"""LoRA adapters of a running server: served beside their base model, loaded and unloaded by vLLM's routes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import RunningServer, serving
from tests.unit.compute.lora_models import write_adapter


@pytest.fixture(scope="module")
def adapters(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the small model."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poet", "lawyer")):
        write_adapter(folder / name, Path(tiny_model), seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(tiny_model: str, adapters: Path) -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--mixed", "1", "--served-name", "base", "--kv-blocks", "64")
    with serving(tiny_model, *flags, "--lora-modules", f"poet={adapters / 'poet'}") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def _text(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "the sea", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]


def test_an_adapter_answers_beside_its_base_model(client: httpx.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "poet"]
    assert _text(client, "poet") != _text(client, "base")


def test_an_adapter_is_loaded_and_unloaded_while_the_base_serves(client: httpx.Client, adapters: Path) -> None:
    body = {"lora_name": "lawyer", "lora_path": str(adapters / "lawyer"), "load_inplace": False}
    loaded = client.post("/v1/load_lora_adapter", json=body).raise_for_status().json()
    assert (loaded["id"], loaded["state"]) == ("lawyer", "ready")
    assert len({_text(client, name) for name in ("base", "poet", "lawyer")}) == 3
    client.post("/v1/unload_lora_adapter", json={"lora_name": "lawyer"}).raise_for_status()
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "poet"]


def test_an_adapter_that_is_unloaded_while_it_loads_ends_the_loading_request(
    client: httpx.Client, server: RunningServer, adapters: Path
) -> None:
    body = {"lora_name": "lawyer", "lora_path": str(adapters / "lawyer")}
    with ThreadPoolExecutor(1) as pool, server.client() as other:
        for _ in range(5):  # the adapter may be ready before it is unloaded
            loading = pool.submit(other.post, "/v1/load_lora_adapter", json=body)
            server.wait_until(lambda _: _is_known(client, "lawyer"), reason="the adapter loads")
            client.post("/v1/unload_lora_adapter", json={"lora_name": "lawyer"}).raise_for_status()
            response = loading.result()
            if response.status_code == 500:
                break
    assert "it was unloaded" in response.json()["error"]["message"]
    assert client.post("/v1/load_lora_adapter", json=body).raise_for_status().json()["state"] == "ready"
    client.post("/v1/unload_lora_adapter", json={"lora_name": "lawyer"}).raise_for_status()


def _is_known(client: httpx.Client, name: str) -> bool:
    return any(model["id"] == name for model in client.get("/cluster/models").json()["models"])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"lora_path": "/nowhere"}, 400, "holds no adapter_config.json"),
        ({"lora_name": "poet"}, 400, "two models are named 'poet'"),
        ({"base_model": "poet"}, 404, "no base model 'poet'"),
        ({"lora_path": ""}, 400, "lora_path is empty"),
        ({"lora_name": 7}, 400, "lora_name"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    client: httpx.Client, adapters: Path, fields: dict[str, Any], status: int, words: str
) -> None:
    body = {"lora_name": "new", "lora_path": str(adapters / "lawyer")} | fields
    response = client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404
