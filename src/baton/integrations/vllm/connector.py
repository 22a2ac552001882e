"""vLLM's KV connector to Baton's stores. vLLM loads it in its own processes.

`--kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path":
"baton.integrations.vllm.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"store": "pool://127.0.0.1:8700"}}'`
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.integrations.vllm.block_copies import BlockCopies, block_bytes
from baton.integrations.vllm.block_plan import BlockPlan, StepCopies
from baton.move.store.port import Store
from baton.move.store.store_url import open_store

_LIST_S = 1.0
"""Pause between two listings of the store, whose blocks other servers write too."""
_SAMPLE_BYTES = 65536
_SETTINGS = ("quantization", "hf_overrides", "rope_scaling", "rope_theta")
"""Settings of a model that change its KV. vLLM has removed the last two."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of the scheduler to the workers, sent with each step."""

    copies: StepCopies


class BatonConnector(KVConnectorBase_V1):
    """Reads and writes KV blocks in a store of Baton, under Baton's hashes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"BatonConnector supports models whose layers share one kind of KV cache, but this one has "
                f"{len(groups)}: start vLLM without it"
            )
        spec = groups[0].kv_cache_spec
        self._block_tokens = spec.block_size
        self._block_bytes = spec.page_size_bytes * len(groups[0].layer_names)
        self._plan = BlockPlan(self._block_tokens)
        self._copies: BlockCopies | None = None
        self._lister: _Lister | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._lister = _Lister(self._open())

    def _open(self) -> Store:
        url = self._kv_transfer_config.get_from_extra_config("store", "")
        if not url:
            raise ValueError('BatonConnector needs "kv_connector_extra_config": {"store": "pool://HOST:PORT"}')
        return open_store(url, layout_fingerprint=self._fingerprint(), block_bytes=self._block_bytes)

    def _fingerprint(self) -> str:
        """Return a digest of everything that a block's bytes depend on, except its tokens and its rank.

        It has no value that vLLM changes while it loads the model: the scheduler would not find the blocks of workers.
        """
        config, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        parts = [repr(spec), f"{parallel.tensor_parallel_size} {parallel.pipeline_parallel_size}", str(config.dtype)]
        settings = vars(config)
        parts += [json.dumps(settings.get(name), sort_keys=True, default=_plain) for name in _SETTINGS]
        parts.append("e5m2" if "e5m2" in self._vllm_config.cache_config.cache_dtype else "")
        if "longrope" in repr(settings.get("hf_text_config")):  # the length selects the rotary factors
            parts.append(str(config.max_model_len))
        digest = blake2b("\n".join(["vllm", *parts]).encode(), digest_size=16)
        for part in _model_parts(config.model, config.revision or ""):
            digest.update(part)
        return digest.hexdigest()

    # ---- the scheduler's side

    def on_new_request(self, request: Request) -> None:
        if request.lora_request is not None or request.mm_features or request.prompt_token_ids is None:
            return
        hands_off = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        self._plan.add(request.request_id, request.all_token_ids, request.cache_salt or "", hands_off=hands_off)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        promised = int(params.get("stored_tokens", 0)) if params.get("do_remote_prefill") else 0
        if self._lister is not None and (listed := self._lister.take()) is not None:
            self._plan.note_stored(listed)
        tokens = self._plan.readable_tokens(request.request_id, num_computed_tokens, promised)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._plan.begin_reading(request.request_id, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._plan.place(new.req_id, new.block_ids[0], replaces=True)
            self._plan.compute(new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        known = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(known.req_ids):
            blocks = known.new_block_ids[index]
            if blocks is not None:
                self._plan.place(request_id, blocks[0], replaces=request_id in known.resumed_req_ids)
            self._plan.compute(request_id, known.num_computed_tokens[index] + scheduled[request_id])
        return StepMetadata(self._plan.take())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        stored_tokens = self._plan.end(request.request_id)
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "stored_tokens": stored_tokens}

    # ---- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        wrong = {name: tuple(layer.shape) for name, layer in kv_caches.items() if layer.shape[0] != blocks}
        if wrong or block_bytes([*kv_caches.values()]) != self._block_bytes:
            raise ValueError(f"BatonConnector does not know this layout of the KV cache: {blocks} blocks, {wrong}")
        self._copies = BlockCopies(self._open(), kv_caches, rank=self._vllm_config.parallel_config.rank)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        if self._copies is not None:
            self._copies.begin_reads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # requests wait for their reads before their first step, so that no read holds up the others of a batch

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        if self._copies is not None:
            self._copies.copy_layer(layer_name, self._step())

    def wait_for_save(self) -> None:
        if self._copies is not None:
            self._copies.write(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._copies.ended_reads() or None) if self._copies is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.take_failed() if self._copies is not None else set()

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies.close()
        if self._lister is not None:
            self._lister.close()

    def _step(self) -> StepCopies:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.copies


class _Lister:
    """Lists a store's blocks in a thread, again and again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: list[BlockHash] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="baton-kv-list", daemon=True).start()

    def take(self) -> Iterable[BlockHash] | None:
        """Return the newest list once. None: there is no new one."""
        listed, self._listed = self._listed, None
        return listed

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listed = self._store.held()
            except StoreError:
                self._listed = []
            self._closed.wait(_LIST_S)
        self._store.close()


def _plain(override: object) -> object:
    """Return a setting as JSON's types: of a function its name, which is the same in every process.

    Raises ValueError for other objects: their types do not tell two of them apart.
    """
    if isinstance(override, FunctionType):
        return override.__qualname__
    if isinstance(override, partial):
        return [override.func, override.args, override.keywords]
    raise ValueError(f"BatonConnector cannot tell {override!r} from other settings: give a function or plain values")


def _model_parts(model: str, revision: str) -> Iterable[bytes]:
    """Yield what identifies the weights: of a folder its configuration and samples of its files, else the names."""
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        yield f"{model} {revision}".encode()
        return
    for file in (folder / "config.json", *files):
        size = file.stat().st_size
        yield f"{file.name} {size}".encode()
        with file.open("rb") as opened:
            opened.seek(max(0, size - _SAMPLE_BYTES) // 2)
            yield opened.read(_SAMPLE_BYTES)
