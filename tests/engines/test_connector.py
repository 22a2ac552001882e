"""BatonConnector as vLLM calls it: two servers with one store. vLLM itself is a few classes here.

`test_real_started_vllm.py` runs the connector in real servers.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.types import BlockHash
from baton.move.store.node import StoreNode

PROMPT = list(range(100, 130))
BLOCK_TOKENS, BLOCKS = 8, 6
LAYERS = ("layer.0", "layer.1")
LAYER_BYTES = 1 * BLOCK_TOKENS * 4 * 2
POLLS_MAX = 20_000


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase:
    """What vLLM's class does for its subclasses."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with these classes for vLLM's."""
    names = {
        "vllm.config": {"VllmConfig": object},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase,
            "KVConnectorMetadata": object,
            "KVConnectorRole": Role,
        },
        "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": object},
        "vllm.v1.core.sched.output": {"SchedulerOutput": object},
        "vllm.v1.kv_cache_interface": {"KVCacheConfig": object},
        "vllm.v1.request": {"Request": object},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        for end in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:end])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
    monkeypatch.delitem(sys.modules, "baton.integrations.vllm.connector", raising=False)
    module = importlib.import_module("baton.integrations.vllm.connector")
    monkeypatch.setattr(module, "_LIST_S", 0.01)
    yield module
    sys.modules.pop("baton.integrations.vllm.connector", None)


@pytest.fixture
def pool() -> Iterator[StoreNode]:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=1 << 16)
    yield node
    node.close()


def config(store: str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="org/model", revision=None, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda _name, default: store or default),
    )


def cache_config(groups: int = 1) -> Any:
    spec = SimpleNamespace(block_size=BLOCK_TOKENS, page_size_bytes=LAYER_BYTES)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS)
    return SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=BLOCKS)


class Server:
    """A vLLM server with one worker, which computes the KV of a layer as a number of the block's."""

    def __init__(self, connector: Any, store: str) -> None:
        roles = (Role.SCHEDULER, Role.WORKER)
        self.scheduler, self.worker = (connector.BatonConnector(config(store), role, cache_config()) for role in roles)
        self.layers = {name: torch.zeros(BLOCKS, 1, BLOCK_TOKENS, 4, dtype=torch.bfloat16) for name in LAYERS}
        self.worker.register_kv_caches(self.layers)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def arrive(self, request: Any, *, tokens: int) -> int:
        """Let a request arrive once the store is known to have so many of its tokens. Return the tokens to read."""
        self.scheduler.on_new_request(request)
        for _ in range(POLLS_MAX):
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            assert is_async == (found > 0), "reads do not hold up other requests"
            if found >= tokens:
                return found
            self.scheduler._lister._closed.wait(0.001)
        raise AssertionError(f"the store lists fewer than {tokens} tokens")

    def step(self, *new: Any, blocks: list[int]) -> None:
        """Run one step, layer by layer. New requests compute all of their tokens."""
        starts = [SimpleNamespace(req_id=each.request_id, block_ids=[blocks], num_computed_tokens=0) for each in new]
        known = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        counts = {each.request_id: len(each.all_token_ids) for each in new}
        output = SimpleNamespace(num_scheduled_tokens=counts, scheduled_new_reqs=starts, scheduled_cached_reqs=known)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        for number, (name, layer) in enumerate(self.layers.items()):
            self.worker.wait_for_layer_load(name)
            if new:
                for place, block in enumerate(blocks):
                    layer[block] = 10 * number + place + 1
            self.worker.save_kv_layer(name, layer, None)
        self.worker.wait_for_save()

    def read(self, request: Any, tokens: int, blocks: list[int]) -> set[int]:
        """Read the offered tokens into blocks. Return the blocks that vLLM is told to compute."""
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: [blocks]), tokens)
        self.step(blocks=blocks)
        for _ in range(POLLS_MAX):
            _sent, received = self.worker.get_finished(set())
            if received:
                assert received == {request.request_id}
                return self.worker.get_block_ids_with_load_errors()
            self.scheduler._lister._closed.wait(0.001)
        raise AssertionError("the read has not ended")


def request(name: str, **params: object) -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=PROMPT,
        prompt_token_ids=PROMPT,
        lora_request=None,
        mm_features=None,
        cache_salt=None,
        kv_transfer_params=params or None,
    )


def test_kv_outlives_its_server_and_is_read_by_the_next_one(connector: Any, pool: StoreNode) -> None:
    url = f"pool://{pool.address}"
    first, asked = Server(connector, url), request("a", do_remote_decode=True)
    first.arrive(asked, tokens=0)
    first.step(asked, blocks=[1, 2, 3, 4])
    told = first.scheduler.request_finished(asked, [1, 2, 3, 4])
    assert told == (False, {"do_remote_prefill": True, "do_remote_decode": False, "stored_tokens": 24})
    first.close()
    second, again = Server(connector, url), request("b")
    assert second.arrive(again, tokens=24) == 24, "the last token is computed"
    assert second.read(again, 24, [5, 0, 2, 3]) == set()
    for number, name in enumerate(LAYERS):
        assert [int(second.layers[name][block].unique()) for block in (5, 0, 2)] == [10 * number + n for n in (1, 2, 3)]
        assert not second.layers[name][3].any(), "the unfinished block is not read"
    second.close()


def test_a_read_that_fails_is_reported_and_not_offered_again(connector: Any, pool: StoreNode) -> None:
    """The prefill server promises blocks that are gone. vLLM computes them (`kv_load_failure_policy: recompute`)."""
    server = Server(connector, f"pool://{pool.address}")
    promised = request("c", do_remote_prefill=True, stored_tokens=24)
    assert server.arrive(promised, tokens=24) == 24
    assert server.read(promised, 24, [1, 2, 3, 4]) == {1, 2, 3}
    assert server.worker.get_block_ids_with_load_errors() == set()
    assert server.scheduler.get_num_new_matched_tokens(promised, 0) == (0, False)
    server.close()


def test_blocks_of_a_pool_that_ends_are_reported(connector: Any, pool: StoreNode) -> None:
    server, asked = Server(connector, f"pool://{pool.address}"), request("d", do_remote_decode=True)
    server.arrive(asked, tokens=0)
    server.step(asked, blocks=[1, 2, 3, 4])
    server.scheduler.request_finished(asked, [1, 2, 3, 4])
    again = request("e")
    assert server.arrive(again, tokens=24) == 24
    pool.close()
    assert server.read(again, 24, [0, 5, 1, 2]) == {0, 5, 1}
    server.close()


def test_models_with_several_kinds_of_kv_cache_are_refused(connector: Any) -> None:
    with pytest.raises(ValueError, match="share one kind of KV cache, but this one has 2: start vLLM without it"):
        connector.BatonConnector(config("memory://?bytes=1e6"), Role.SCHEDULER, cache_config(groups=2))


def test_what_is_missing_is_told(connector: Any, pool: StoreNode) -> None:
    with pytest.raises(ValueError, match='BatonConnector needs "kv_connector_extra_config"'):
        connector.BatonConnector(config(""), Role.SCHEDULER, cache_config())
    worker = connector.BatonConnector(config(f"pool://{pool.address}"), Role.WORKER, cache_config())
    with pytest.raises(ValueError, match="does not know this layout"):
        worker.register_kv_caches({name: torch.zeros(2, BLOCKS, BLOCK_TOKENS, 4) for name in LAYERS})


def test_requests_whose_kv_depends_on_more_than_tokens_are_left_alone(connector: Any, pool: StoreNode) -> None:
    server, adapted = Server(connector, f"pool://{pool.address}"), request("f", do_remote_decode=True)
    adapted.lora_request = object()
    server.scheduler.on_new_request(adapted)
    server.step(adapted, blocks=[1, 2, 3, 4])
    assert server.scheduler.request_finished(adapted, [1, 2, 3, 4])[1]["stored_tokens"] == 0
    assert server.scheduler._lister._store.held() == list[BlockHash]()
    server.close()


def yarn(config: Any, factor: float = 1.0) -> Any:
    return config


def test_servers_whose_settings_give_different_kv_do_not_share_blocks(connector: Any) -> None:
    def fingerprint(*, cache_dtype: str = "auto", **settings: object) -> str:
        made = config("memory://?bytes=1e6")
        made.cache_config.cache_dtype = cache_dtype
        vars(made.model_config).update(settings)
        return connector.BatonConnector(made, Role.SCHEDULER, cache_config())._fingerprint()

    different: list[dict[str, Any]] = [
        {},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_parameters": {"factor": 2.0, "rope_type": "yarn"}}},
        {"hf_overrides": {"rope_parameters": {"factor": 4.0, "rope_type": "yarn"}}},
        {"hf_overrides": yarn},
        {"hf_overrides": partial(yarn, factor=2.0)},
        {"hf_overrides": partial(yarn, factor=4.0)},
        {"rope_theta": 1e6},
        {"cache_dtype": "fp8_e5m2"},
        {"hf_text_config": {"rope_type": "longrope"}, "max_model_len": 4096},
        {"hf_text_config": {"rope_type": "longrope"}, "max_model_len": 8192},
    ]
    assert len({fingerprint(**settings) for settings in different}) == len(different)
    turned = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert fingerprint(hf_overrides=turned) == fingerprint(**different[2]), "the order of names has no effect"
    with pytest.raises(ValueError, match="give a function or plain values"):
        fingerprint(hf_overrides=object())
    assert fingerprint(cache_dtype="fp8_ds_mla") == fingerprint(), "the KV cache's specification tells these apart"
