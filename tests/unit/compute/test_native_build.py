"""The build of the native engine, and the fallback to the torch engine with a reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.compute.load_engine import choose_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import engine_sources, has_to_be_built, library_path
from baton.move.compiling import find_compiler
from tests.unit.compute.models import tiny_llama


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return resolve_model(str(folder))


def _fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Make a shell script the only compiler on PATH, and use an empty cache folder."""
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "deepseek3"])
def test_without_a_compiler_torch_serves(
    architecture: str, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = msgspec.structs.replace(card, architecture=architecture)
    choice = choose_engine(served, card.layout(block_tokens=16, dtype="float32"))
    assert choice.kind == "torch"
    assert "no C++ compiler (g++ or clang++) on PATH; install one" in str(choice)


def test_a_library_that_is_there_serves_without_a_compiler(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built with a compiler, and runs without one."""
    built = library_path()
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = choose_engine(card, card.layout(block_tokens=16, dtype="float32"))
    assert (choice.kind, choice.library) == ("native", built)


def test_a_library_that_cannot_be_loaded_is_named_and_torch_serves(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_compiler(tmp_path, monkeypatch, ': > "$(eval echo \\${$#})"')
    choice = choose_engine(card, card.layout(block_tokens=16, dtype="float32"))
    assert choice.kind == "torch"
    assert f"remove {library_path()} to have it built again" in choice.reason


def test_with_a_compiler_that_fails_torch_serves_and_nothing_is_left(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's message is part of the reason. The next start tries again."""
    _fake_compiler(tmp_path, monkeypatch, 'echo "x.cpp:1: error: no such flag" >&2; exit 1')
    choice = choose_engine(card, card.layout(block_tokens=16, dtype="float32"))
    assert choice.kind == "torch"
    assert "error: no such flag" in str(choice)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is built once, then found in the cache."""
    _fake_compiler(tmp_path, monkeypatch, ': > "$(eval echo \\${$#})"')
    assert has_to_be_built()
    first = library_path()
    assert not has_to_be_built()
    _fake_compiler(tmp_path, monkeypatch, "exit 1")
    assert library_path() == first


def test_a_library_has_the_kernels_of_the_processor_that_will_load_it() -> None:
    """Each set takes seconds to compile. A library for every processor, as an image needs it, has them all."""

    def sets(features: str | None) -> set[str]:
        chosen = None if features is None else frozenset(features.split())
        return {unit for unit in engine_sources("x86_64", chosen).units if unit.startswith("isa_")}

    assert sets("sse2") == {"isa_plain"}
    assert sets("sse2 avx2 fma f16c") == {"isa_plain", "isa_avx2"}
    assert sets("avx2 fma f16c avx512f avx512bw avx512vl avx512dq") == {"isa_plain", "isa_avx2", "isa_avx512"}
    assert sets(None) > sets("avx2 fma f16c avx_vnni avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni")


def test_models_without_native_support_use_torch(card: ModelCard) -> None:
    """Each reason names the problem."""
    other = msgspec.structs.replace(card, architecture="of tomorrow")
    wide = msgspec.structs.replace(card, head_dim=1026)
    for refused, dtype, device, word in (
        (card, "float16", "cpu", "float16"),
        (card, "float32", "cuda", "cuda"),
        (other, "float32", "cpu", "of tomorrow"),
        (wide, "float32", "cpu", "1026"),
    ):
        choice = choose_engine(refused, refused.layout(block_tokens=16, dtype=dtype), device=device)
        assert (choice.kind, word in choice.reason) == ("torch", True)


def test_a_compiler_is_found_here() -> None:
    """CI has one, so that the tests of the native engine do run."""
    assert Path(find_compiler()).is_file()
