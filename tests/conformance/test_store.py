"""The contract of every Store: the right bytes or a miss, whatever happens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.core.types import BlockHash
from baton.move.store.encrypted import OVERHEAD_BYTES, EncryptedStore
from baton.move.store.file import FileStore
from baton.move.store.memory import MemoryStore
from baton.move.store.node import StoreNode
from baton.move.store.node_store import PART_BYTES
from baton.move.store.object_store import ObjectPlace, ObjectStore
from baton.move.store.port import Store
from baton.move.store.redis_store import PIECE_BYTES, RedisStore
from baton.move.store.segments import slot_bytes
from baton.move.store.slot_io import RUN_BYTES
from baton.move.store.store_url import open_store
from tests.mooncake_servers import Mooncake, mooncake
from tests.store_servers import redis_server, s3_server
from tests.stores import PACKING, block, get, names, packed, put, room

CAPACITY_BLOCKS = 24


@dataclass
class Made:
    """A kind of store, and how to open it."""

    open: Callable[[], Store]
    block_bytes: int
    outlives: bool
    """Blocks survive a close."""
    forgets: bool
    """It evicts the oldest blocks by itself."""
    is_ordered: bool = True
    """It knows the order of its blocks, even within one call."""


def _memory(folder: Path, block_bytes: int) -> Made:
    def open_() -> Store:
        return MemoryStore(block_bytes=block_bytes, capacity_bytes=CAPACITY_BLOCKS * block_bytes)

    return Made(open_, block_bytes, outlives=False, forgets=True)


def _file(folder: Path, block_bytes: int, mode: str) -> Made:
    def open_() -> Store:
        return FileStore(
            folder / "store",
            layout_fingerprint="a layout",
            block_bytes=block_bytes,
            capacity_bytes=CAPACITY_BLOCKS * slot_bytes(block_bytes),
            mode=mode,
        )

    return Made(open_, block_bytes, outlives=True, forgets=True)


FILES = {
    "file": lambda folder: _file(folder, 8192, "direct"),
    "file-odd-size": lambda folder: _file(folder, 5001, "direct"),
    "file-buffered": lambda folder: _file(folder, 8192, "buffered"),
    "file-large": lambda folder: _file(folder, RUN_BYTES + 4096, "direct"),
    "file-large-odd-size": lambda folder: _file(folder, RUN_BYTES + 77, "direct"),
}


def _redis(port: int, block_bytes: int) -> Made:
    prefix = f"test-{next(_numbers)}"

    def open_() -> Store:
        return RedisStore(
            f"redis://127.0.0.1:{port}", layout_fingerprint="a layout", block_bytes=block_bytes, prefix=prefix
        )

    return Made(open_, block_bytes, outlives=True, forgets=False, is_ordered=False)


def _mooncake(cluster: Mooncake, block_bytes: int) -> Made:
    url = f"{cluster.url}&prefix=test-{next(_numbers)}"
    return Made(
        lambda: open_store(url, layout_fingerprint="a layout", block_bytes=block_bytes),
        block_bytes,
        outlives=True,
        forgets=False,
        is_ordered=False,
    )


def _objects(endpoint: str, block_bytes: int) -> Made:
    place = ObjectPlace(
        bucket="blocks",
        prefix=f"test-{next(_numbers)}",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
    )

    def open_() -> Store:
        return ObjectStore(place, layout_fingerprint="a layout", block_bytes=block_bytes)

    return Made(open_, block_bytes, outlives=True, forgets=False, is_ordered=False)


@pytest.fixture
def pool_node() -> Iterator[Callable[..., Made]]:
    """A node in this process, with the threads and sockets of a real one."""
    nodes: list[StoreNode] = []

    def make(block_bytes: int, options: str = "") -> Made:
        nodes.append(StoreNode(host="127.0.0.1", port=0, capacity_bytes=CAPACITY_BLOCKS * block_bytes))
        url = f"pool://{nodes[-1].address}{options}"
        return Made(
            lambda: open_store(url, layout_fingerprint="a layout", block_bytes=block_bytes),
            block_bytes,
            outlives=True,
            forgets=True,
            is_ordered=not options or block_bytes < PART_BYTES // CAPACITY_BLOCKS,
        )

    yield make
    for node in nodes:
        node.close()


def _encrypted(folder: Path, block_bytes: int) -> Made:
    below = _file(folder, block_bytes + OVERHEAD_BYTES, "direct")

    def open_() -> Store:
        return EncryptedStore(bytes(32), layout_fingerprint="a layout", open_inner=lambda fingerprint: below.open())

    return Made(open_, block_bytes, outlives=True, forgets=True)


_numbers = itertools.count()


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("blocks") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mooncake]:
    with mooncake(memory="256MB") as cluster:
        yield cluster


POOLS = ("pool", "pool-large", "pool-tcp", "pool-tcp-streams")


ALIGNED = pytest.param("file-large", marks=pytest.mark.deep)
"""The other large file has the same runs of 4 MiB, and a rest."""


@pytest.fixture(
    params=[
        "memory",
        *(ALIGNED if kind == "file-large" else kind for kind in FILES),
        "encrypted",
        "packed",
        *POOLS,
        "redis",
        "redis-pieces",
        "s3",
        pytest.param("mooncake", marks=pytest.mark.deep),
        pytest.param("mooncake-large", marks=pytest.mark.deep),
    ]
)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    match request.param:
        case "memory":
            return _memory(tmp_path, 8192)
        case "encrypted":
            return _encrypted(tmp_path, 8192)
        case "packed":
            below = _file(tmp_path, PACKING.block_bytes, "direct")
            return replace(below, open=lambda: packed(below.open()), block_bytes=PACKING.layout.block_bytes)
        case "pool":
            return request.getfixturevalue("pool_node")(8192)
        case "pool-large":
            return request.getfixturevalue("pool_node")(PART_BYTES + 77)
        case "pool-tcp":
            return request.getfixturevalue("pool_node")(8192, "?via=tcp")
        case "pool-tcp-streams":
            return request.getfixturevalue("pool_node")(PART_BYTES // 4, "?via=tcp")
        case "redis":
            return _redis(request.getfixturevalue("redis_port"), 8192)
        case "redis-pieces":
            return _redis(request.getfixturevalue("redis_port"), 2 * PIECE_BYTES + 17)
        case "mooncake":
            return _mooncake(request.getfixturevalue("cluster"), 8192)
        case "mooncake-large":
            return _mooncake(request.getfixturevalue("cluster"), (1 << 20) + 77)
        case "s3":
            return _objects(request.getfixturevalue("endpoint"), 8192)
        case kind:
            return FILES[kind](tmp_path)


@pytest.fixture
def store(made: Made) -> Iterator[Store]:
    store = made.open()
    yield store
    store.close()


def _held(made: Made, store: Store) -> list[BlockHash]:
    return _as_told(made, store.held())


def _as_told(made: Made, blocks: list[BlockHash]) -> list[BlockHash]:
    """Ordered by age, or sorted if the server does not know the age."""
    return blocks if made.is_ordered else sorted(blocks)


@pytest.mark.parametrize("aligned", [True, False])
def test_what_was_put_comes_back(made: Made, store: Store, *, aligned: bool) -> None:
    """In one call or one by one, in any order, into memory at any address."""
    some = names(9)
    assert put(store, some, made.block_bytes) == [True] * 9
    assert get(store, some[::-1], made.block_bytes, aligned=aligned) == [True] * 9
    assert [get(store, [name], made.block_bytes, aligned=aligned) for name in some] == [[True]] * 9
    assert _held(made, store) == _as_told(made, some)
    assert (store.counters.put, store.counters.hits, store.counters.misses) == (9, 18, 0)


def test_nothing_is_asked_for_and_nothing_comes(store: Store) -> None:
    assert (store.put([]), store.get([]), store.held()) == ([], [], [])
    store.drop([])


def test_an_unknown_block_is_a_miss(made: Made, store: Store) -> None:
    known, unknown = names(2)
    put(store, [known], made.block_bytes)
    assert get(store, [unknown, known, unknown], made.block_bytes) == [False, True, False]
    assert (store.counters.hits, store.counters.misses, store.counters.damaged) == (1, 2, 0)


@pytest.mark.parametrize("wrong_bytes", [-1, 1])
def test_another_size_is_neither_kept_nor_found(made: Made, store: Store, wrong_bytes: int) -> None:
    good, bad = names(2)
    assert store.put([block(bad, made.block_bytes + wrong_bytes), block(good, made.block_bytes)]) == [False, True]
    assert store.counters.refused == 1
    assert get(store, [bad], made.block_bytes) == [False]
    assert store.get([room(good, made.block_bytes + wrong_bytes)]) == [False]
    assert get(store, [good], made.block_bytes) == [True], "it was asked for wrongly, and is still there"


def test_a_block_that_comes_twice_is_kept_once(made: Made, store: Store) -> None:
    """In one call, and in a later one."""
    one, other = names(2)
    assert put(store, [one, one, other], made.block_bytes) == [True] * 3
    assert put(store, [other, one], made.block_bytes) == [True] * 2
    assert _held(made, store) == _as_told(made, [other, one]), "put again is young again"
    assert get(store, [one, one, other], made.block_bytes) == [True] * 3
    assert store.counters.put == 2


def test_a_dropped_block_is_gone_and_its_room_is_free(made: Made, store: Store) -> None:
    some = names(CAPACITY_BLOCKS)
    put(store, some, made.block_bytes)
    store.drop([*some[:4], *names(3, first=1000), some[0]])
    assert get(store, some, made.block_bytes) == [False] * 4 + [True] * (CAPACITY_BLOCKS - 4)
    assert store.counters.dropped == (4 if store.name != "s3" else 7), "an object store does not tell what was there"
    again = names(4, first=2000)
    assert put(store, again, made.block_bytes) == [True] * 4
    assert get(store, [*some[4:], *again], made.block_bytes) == [True] * CAPACITY_BLOCKS


def test_a_full_store_forgets_the_oldest(made: Made, store: Store) -> None:
    if not made.forgets:
        pytest.skip("its server makes the room")
    assert store.capacity_blocks in (CAPACITY_BLOCKS, None)
    some = names(CAPACITY_BLOCKS + 7)
    for start in range(0, len(some), 3):
        assert all(put(store, some[start : start + 3], made.block_bytes))
    assert get(store, some, made.block_bytes) == [False] * 7 + [True] * CAPACITY_BLOCKS
    assert store.held() == some[7:]
    assert store.counters.dropped == (0 if store.name == "pool" else 7), "what a node forgets, it tells nobody"


def test_more_than_everything_in_one_call(made: Made, store: Store) -> None:
    """Blocks that it reports as kept can be read."""
    many = names(CAPACITY_BLOCKS * 2)
    kept = put(store, many, made.block_bytes)
    held = store.held()
    if made.is_ordered:
        assert kept == [name in held for name in many]
    else:  # parts of the call that are kept side by side may push each other out
        assert all(is_kept or name not in held for is_kept, name in zip(kept, many, strict=True))
    assert get(store, many, made.block_bytes) == [name in held for name in many]
    assert len(held) >= CAPACITY_BLOCKS


def test_a_closed_store_finds_its_blocks_again(made: Made) -> None:
    some = names(CAPACITY_BLOCKS + 2)
    first = made.open()
    for name in some:
        put(first, [name], made.block_bytes)
    first.drop(some[5:8])
    held = _held(made, first)
    first.close()
    second = made.open()
    assert _held(made, second) == (held if made.outlives else [])
    assert get(second, held, made.block_bytes) == [made.outlives] * len(held)
    assert get(second, some[5:8], made.block_bytes) == [False] * 3
    assert all(put(second, names(3, first=500), made.block_bytes))
    second.close()


def test_a_closed_store_says_no(made: Made) -> None:
    some = names(2)
    store = made.open()
    put(store, some, made.block_bytes)
    store.close()
    store.close()
    assert put(store, names(1, first=7), made.block_bytes) == [False]
    assert get(store, some, made.block_bytes) == [False, False]
    store.drop(some)


def test_many_threads_get_the_right_bytes(made: Made, store: Store) -> None:
    """Puts, gets and drops of the same few blocks at once, in a store that is always full."""
    some, problems = names(CAPACITY_BLOCKS * 2), []
    turns = 12 if made.block_bytes < 1 << 20 and store.name != "s3" else 3

    def play(seed: int) -> None:
        try:
            for turn in range(turns):
                mine = [some[(seed * 7 + turn * 5 + step) % len(some)] for step in range(6)]
                put(store, mine, made.block_bytes)
                get(store, mine, made.block_bytes, aligned=turn % 2 == 0)
                store.drop(mine[:2])
        except AssertionError as error:
            problems.append(error)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert store.counters.damaged == 0
    get(store, store.held(), made.block_bytes)  # what was dropped while it was put may be listed until it is asked for
    held = store.held()
    assert get(store, held, made.block_bytes) == [True] * len(held)
    assert len(held) == len(set(held))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop", "reopen"]), st.lists(st.integers(0, 39), max_size=8)), max_size=30
)


@pytest.mark.parametrize("kind", ["file", "file-odd-size"])
@settings(
    max_examples=settings().max_examples // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(
    actions=[("put", list(range(8))), ("put", list(range(8, 16))), ("put", list(range(16, 24))), ("put", [30, 31, 0])]
)
@given(actions=ACTIONS)
def test_it_says_what_the_plain_dict_says(kind: str, actions: list[tuple[str, list[int]]], tmp_path_factory) -> None:
    """For any order of calls and restarts: the same answers and order as the store in memory."""
    made, some = FILES[kind](tmp_path_factory.mktemp("store")), names(40)
    oracle, store = MemoryStore(block_bytes=made.block_bytes, capacity_bytes=24 * made.block_bytes), made.open()
    for action, numbers in actions:
        wanted: list[BlockHash] = [some[number] for number in numbers]
        if action == "put":
            assert put(store, wanted, made.block_bytes) == put(oracle, wanted, made.block_bytes)
        elif action == "get":
            assert get(store, wanted, made.block_bytes) == get(oracle, wanted, made.block_bytes)
        elif action == "drop":
            store.drop(wanted)
            oracle.drop(wanted)
        else:
            store.close()
            store = made.open()
        assert store.held() == oracle.held()
    store.close()
