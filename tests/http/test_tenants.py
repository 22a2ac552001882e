"""Keys of a key file: reloads, and the bounds of what clients may ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from baton.compute.hash_engine import hash_card
from baton.compute.models.chat_template import ChatInput
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.config import PolicyConfig, SandboxConfig
from baton.core.errors import ConfigError, RequestError
from baton.core.keys import KeyEntry, KeyFile, KeyLimits, Scope, digest_of
from baton.core.plugin import load_plugin
from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts, EvictionOrder
from baton.decide.kv.hashing import block_hashes, root_hash
from baton.serve.http.identity import Identity, Keyring, KeySources
from baton.serve.http.prompts import PublicPrefixes
from baton.serve.http.services import HttpSettings
from baton.serve.http.unknown_fields import UnknownFields
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.schemas import CompletionRequest
from baton.serve.live.assembly import with_quotas
from tests.http.conftest import House


def entry(key: str, tenant: str, scopes: tuple[Scope, ...] = ("generate",), **limits: int) -> KeyEntry:
    digest = digest_of(key.encode())
    return KeyEntry(id=f"id-{key}", sha256=digest, tenant=tenant, scopes=scopes, limits=KeyLimits(**limits))


def write(path: Path, *entries: KeyEntry) -> KeySources:
    path.write_bytes(msgspec.json.encode(KeyFile(keys=entries)))
    path.chmod(0o600)
    return KeySources(file=path)


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def identity(keyring: Keyring, key: str) -> Identity:
    return keyring.identify(bearer(key))


def test_a_reload_adds_and_revokes_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keyring = Keyring(write(path, entry("one", "a")))
    assert identity(keyring, "one").tenant == "a"
    write(path, entry("two", "b"))
    assert identity(keyring, "one").tenant == "a", "nothing changes before the reload"
    keyring.reload()
    assert identity(keyring, "two").tenant == "b"
    with pytest.raises(RequestError, match="not known"):
        identity(keyring, "one")


def test_an_invalid_file_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keyring = Keyring(write(path, entry("one", "a")))
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"keys\.json: not a JSON file"):
        keyring.reload()
    assert identity(keyring, "one").tenant == "a"


def test_a_file_without_keys_opens_nothing(tmp_path: Path) -> None:
    """The last key was revoked: the server must not become one without keys."""
    with pytest.raises(RequestError, match="send your API key"):
        Keyring(write(tmp_path / "keys.json")).identify({})


def test_scopes_and_limits_come_from_the_file(tmp_path: Path, build: Callable[..., House]) -> None:
    sources = write(tmp_path / "keys.json", entry("one", "a", ("generate", "admin"), streams_max=3), entry("two", "b"))
    found = identity(Keyring(sources), "one")
    assert (found.key, found.scopes, found.limits.streams_max) == ("id-one", {"generate", "admin"}, 3)
    client = TestClient(build(keys=sources).app, base_url="http://localhost")
    path, body = "/cluster/workers/inprocess-0/role", {"role": "mixed"}
    statuses = [client.post(path, json=body, headers=bearer(key)).status_code for key in ("one", "two")]
    assert statuses == [200, 403]


def salts(sources: KeySources, *keys: str, asked: str | None = None) -> list[str]:
    return [identity(Keyring(sources), key).cache_salt(asked) for key in keys]


def test_tenants_hash_their_prompts_from_different_roots(tmp_path: Path) -> None:
    sources = write(tmp_path / "keys.json", entry("1", "a"), entry("2", "a"), entry("3", "b"))
    first, second, third = map(root_hash, salts(sources, "1", "2", "3"))
    assert first == second != third


def test_each_of_several_keys_is_a_tenant_and_keeps_its_cache_in_another_order() -> None:
    """Blocks in a tier outlive the server: the name of a tenant by its place would swap them."""
    first = salts(KeySources(api_keys=("x", "y")), "x", "y")
    assert first[0] != first[1]
    assert salts(KeySources(api_keys=("y", "x")), "x", "y") == first


@pytest.mark.parametrize(
    "sources", [KeySources(), KeySources(api_keys=("x",)), KeySources(api_keys=("x",), admin_key="root")]
)
def test_a_server_with_one_tenant_hashes_as_one_without_keys(sources: KeySources) -> None:
    assert salts(sources, "x") == [""]
    assert salts(sources, "x", asked="mine") == ["mine"]


def test_no_salt_leads_into_the_namespace_of_another_tenant(tmp_path: Path) -> None:
    sources = write(tmp_path / "keys.json", entry("1", "a"), entry("2", "b"))
    assert len({*salts(sources, "1", "2"), *salts(sources, "1", "2", asked="s")}) == 4
    with pytest.raises(RequestError, match="U\\+0000"):
        salts(KeySources(), "", asked=salts(sources, "1")[0])


def test_a_priority_beyond_the_keys_bound_is_a_403(tmp_path: Path) -> None:
    sources = write(tmp_path / "keys.json", entry("1", "a"), entry("2", "a", priority_min=-5))
    plain, urgent = (identity(Keyring(sources), key) for key in "12")
    assert (plain.check_priority(0), plain.check_priority(9), urgent.check_priority(-5)) == (0, 9, -5)
    for bounded, asked in ((plain, -1), (urgent, -6)):
        with pytest.raises(RequestError, match="priority_min") as caught:
            bounded.check_priority(asked)
        assert (caught.value.status, caught.value.param) == (403, "priority")
    assert Keyring().identify({}).check_priority(-99) == -99


def test_the_blocks_of_a_public_prefix_are_shared_and_those_behind_it_are_not() -> None:
    """A system prompt of 40 blocks is cached once; what a tenant adds to it stays its own."""
    tokens = list(range(640)) + [7] * 64

    def hashes(salt: str, public_tokens: int) -> tuple[bytes, ...]:
        return block_hashes(tokens, block_tokens=16, cache_salt=salt, public_tokens=public_tokens)

    first, second = hashes("a\0", 640), hashes("b\0", 640)
    assert first[:40] == second[:40] == block_hashes(tokens, block_tokens=16)[:40]
    assert not set(first[40:]) & set(second[40:])
    assert hashes("", 640) == block_hashes(tokens, block_tokens=16)


def test_the_last_full_block_is_never_public() -> None:
    """The blocks of the output are hashed after it: they would be found by a tenant that sends the same prefix."""
    tokens = list(range(640))
    first, second = (
        block_hashes(tokens, block_tokens=16, cache_salt=salt, public_tokens=9999) for salt in ("a\0", "b\0")
    )
    assert first[:39] == second[:39]
    assert first[39] != second[39]
    short = [block_hashes(tokens[:16], block_tokens=16, cache_salt=salt, public_tokens=16) for salt in ("a\0", "b\0")]
    assert short[0] != short[1]


def test_a_public_prefix_is_found_in_completions_and_chats() -> None:
    card = hash_card()
    tokenizer, template = load_tokenizer(card), load_chat_template(card, SandboxConfig())
    text = "You are a helpful assistant of the company Acme."
    public = PublicPrefixes((text,), tokenizer, template)
    completion = tokenizer.encode(f"{text} Hello", add_special=True)
    assert public.shared_tokens(completion) >= len(tokenizer.encode(text, add_special=False))
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
    chat = tokenizer.encode(template.render(ChatInput(messages, add_generation_prompt=True)), add_special=False)
    assert public.shared_tokens(chat) >= len(tokenizer.encode(text, add_special=False))
    assert public.shared_tokens([]) == 0


def test_only_requests_without_a_salt_use_public_prefixes(tmp_path: Path) -> None:
    tenant = identity(Keyring(write(tmp_path / "keys.json", entry("1", "a"))), "1")
    assert tenant.shares_public_prefixes(None)
    assert not tenant.shares_public_prefixes("mine")


def test_quotas_of_the_key_file_bound_the_cached_blocks_of_its_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, entry("1", "a", kv_blocks_max=2), entry("2", "a", kv_blocks_max=1), entry("3", "b"))
    policy = with_quotas(PolicyConfig(), str(path))
    order = load_plugin(policy.eviction.use, policy.eviction.options, expects=EvictionOrder)
    for number in range(6):
        tenant = "a" if number in (3, 4, 5) else "b"
        order.add(BlockId(number), BlockFacts(BlockHash(bytes([number])), None, 0, tenant))
    assert [order.pop() for _ in range(3)] == [3, 0, 1], "one of a, which is above its quota, then the oldest"
    assert with_quotas(PolicyConfig(), "") == PolicyConfig()


@pytest.mark.parametrize("field", ["kv_transfer_params", "prefill_worker", "data_parallel_rank", "tenant", "slo_class"])
def test_a_client_cannot_say_where_its_request_runs_or_whose_it_is(build: Callable[..., House], field: str) -> None:
    """Such fields of routers and other engines name hosts, which a client could point anywhere."""
    body, into = {"prompt": "a", field: {"remote_host": "10.0.0.1"}}, CompletionRequest
    if field != "kv_transfer_params":  # this one is always refused
        read, ignored = UnknownFields(is_strict=False).read(body, into, partial(convert, into=into))
        assert (read, ignored) == (CompletionRequest(prompt="a"), [field])
    client = TestClient(build(settings=HttpSettings(strict_api=True)).app, base_url="http://localhost")
    response = client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
