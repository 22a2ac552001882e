"""Workers of one host map one copy of the packed weights."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.core.errors import ModelError
from baton.move.weights_file import SEAL_FUTURE_WRITE, WeightsFile
from tests.unit.compute import native_fuzz
from tests.unit.compute.native_fuzz import Engine, make_weights_file
from tests.unit.compute.native_models import Shape, Weights

LOCK = """
import os, sys
from baton.move.weights_file import SEAL_FUTURE_WRITE, WeightsFile
with WeightsFile(int(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def file() -> Iterator[WeightsFile]:
    made = make_weights_file()
    yield made
    os.close(made.descriptor)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return NativeLibrary(library_path())


def _weights(seed: int = 1) -> Weights:
    return Weights(Shape.draw(random.Random(seed)), np.random.default_rng(seed))


def _bits(engine: Engine) -> bytes:
    tokens = [1, 2, 3, 4, 5]
    table = list(range(-(-len(tokens) // engine.shape.block_tokens)))
    return engine.step([(tokens, 0, table)]).tobytes()


def _packed(library: NativeLibrary, file: WeightsFile) -> bytes:
    """Pack weights into the file by an engine that ends, and return its results."""
    packer = Engine(library, _weights(), 5, 1, file=file)
    found = _bits(packer)
    library.free(packer.handle)
    return found


def test_engines_with_shared_weights_give_the_bits_of_one_with_its_own(
    library: NativeLibrary, file: WeightsFile
) -> None:
    """The mapped weights outlive the engine that packed them."""
    own = Engine(library, _weights(), 5, 1)
    expected = _bits(own)
    library.free(own.handle)
    assert _packed(library, file) == expected
    mapped = Engine(library, _weights(), 5, 1, file=file)
    assert _bits(mapped) == expected
    library.free(mapped.handle)


def test_no_process_has_a_private_or_writable_copy(library: NativeLibrary, file: WeightsFile) -> None:
    engines = [Engine(library, _weights(), 5, 1, file=file) for _ in range(2)]
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "baton-weights" in line]
    assert [line.split()[1] for line in lines] == ["r--s", "r--s"]
    with pytest.raises(PermissionError):
        mmap.mmap(file.descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        file.clear()
    for engine in engines:
        library.free(engine.handle)


def test_a_file_that_a_dead_worker_left_half_full_is_filled_again(library: NativeLibrary, file: WeightsFile) -> None:
    expected = _packed(library, file)
    again = make_weights_file()
    os.write(again.descriptor, b"\xff" * (4 << 20))
    assert not again.is_complete
    again.clear()
    assert _packed(library, again) == expected
    assert again.is_complete
    os.close(again.descriptor)


def test_the_lock_of_a_killed_worker_ends_with_it(file: WeightsFile) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(file.descriptor)],
        pass_fds=[file.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    process.kill()
    with file.locked():  # waits for ever if the lock belonged to the open file, which this process has too
        assert process.wait() < 0
    process.communicate()


def test_weights_of_another_version_are_refused(
    library: NativeLibrary, file: WeightsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    _packed(library, file)
    monkeypatch.setattr(native_fuzz, "KEY", "a newer library")
    with pytest.raises(ModelError, match="another model or version"):
        Engine(library, _weights(), 5, 1, file=file)


def test_weights_of_other_sizes_are_refused(library: NativeLibrary, file: WeightsFile) -> None:
    _packed(library, file)
    with pytest.raises(ModelError, match="another model or version"):
        Engine(library, _weights(2), 5, 1, file=file)


def test_an_engine_takes_weights_once(library: NativeLibrary, file: WeightsFile) -> None:
    own = Engine(library, _weights(), 5, 1)
    target = library.weights(own.handle)
    for take in (target.share, target.attach):
        with pytest.raises(ModelError, match="the weights are complete"):
            take(file.descriptor, native_fuzz.KEY)
    library.free(own.handle)


def test_an_empty_file_is_refused(library: NativeLibrary, file: WeightsFile) -> None:
    fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
    with pytest.raises(ModelError, match="is empty"):
        Engine(library, _weights(), 5, 1, file=file)
