"""The sandboxes of a worker compute the masks of many requests, and none fails for the memory of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from baton.compute import mask_sandboxes
from baton.compute.hash_engine import hash_card
from baton.compute.mask_sandboxes import STEP_WAIT_S, MaskSandboxes
from baton.core.config import SandboxConfig
from baton.core.step import Slice
from baton.core.types import Grammar, RequestId, Sampling
from tests.attack.conftest import memory_bytes
from tests.unit.compute.steps import part_of

LIMITS = SandboxConfig(memory_bytes=64 << 20, processes=1)


@pytest.fixture
def sandboxes() -> Iterator[MaskSandboxes]:
    sandboxes = MaskSandboxes(hash_card(), LIMITS)
    yield sandboxes
    sandboxes.close()


def _failure(sandboxes: MaskSandboxes, part: Slice) -> str:
    """Repeat the slice until its masks are ready, as the steps of a worker do. Return why it failed, or nothing."""
    while True:
        (masks,) = sandboxes.begin([part])
        if masks.rows() or masks.failure:
            return masks.failure


def _part(number: int, text: str) -> Slice:
    sampling = Sampling(grammar=Grammar(kind="regex", text=text))
    return part_of([5, 6], [0], request_id=RequestId(f"r{number}"), sampling=sampling)


def test_grammars_that_stay_in_memory_fail_no_later_request(sandboxes: MaskSandboxes) -> None:
    """Each takes half of the memory, and stays compiled."""
    assert [_failure(sandboxes, _part(n, str(n) + "x" * 70_000)) for n in range(3)] == [""] * 3


def test_the_requests_of_a_step_wait_together(sandboxes: MaskSandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late masks delay the other requests of the step once, not once for each grammar."""
    clock, polls = [0.0], []

    def receive(_: object, wait_s: float) -> None:
        """Answer nothing."""
        polls.append(wait_s)
        clock[0] += wait_s

    monkeypatch.setattr(mask_sandboxes, "now_s", lambda: clock[0])
    monkeypatch.setattr(mask_sandboxes._MaskProcess, "_receive", receive)
    assert [masks.rows() for masks in sandboxes.begin([_part(n, "[a-c]") for n in range(16)])] == [[]] * 16
    assert clock == [STEP_WAIT_S]
    assert polls.count(0.0) >= 16


@pytest.mark.deep
def test_an_idle_sandbox_returns_the_memory_of_its_grammars(sandboxes: MaskSandboxes) -> None:
    assert _failure(sandboxes, _part(0, "[a-c]")) == ""
    before = memory_bytes(os.getpid())
    assert _failure(sandboxes, _part(1, "x" * 70_000)) == ""
    assert memory_bytes(os.getpid()) > before + (8 << 20)
    while memory_bytes(os.getpid()) > before + (4 << 20):
        pass  # the test's timeout bounds it
    assert _failure(sandboxes, _part(1, "x" * 70_000)) == ""


def test_a_grammar_that_needs_too_much_memory_alone_fails_its_request(sandboxes: MaskSandboxes) -> None:
    assert _failure(sandboxes, _part(0, "[a-c]")) == ""
    assert "64 MiB of memory" in _failure(sandboxes, _part(1, "((a{1000}){1000}){50}"))
    assert _failure(sandboxes, _part(2, "[a-c]")) == ""
