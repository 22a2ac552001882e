"""Checks of grammars wait in turn of their clients, each grammar is checked once, and the queue has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import SandboxConfig
from baton.core.errors import RequestError
from baton.core.types import Grammar
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.wire.constraint import Constraint
from baton.serve.http.wire.errors import ClusterError

LIMITS = SandboxConfig(processes=1, waiting_max=4)


def _with_checker(test: Callable[[GrammarChecker], Coroutine[None, None, None]]) -> None:
    checker = GrammarChecker(hash_card(), LIMITS)
    try:
        asyncio.run(test(checker))
    finally:
        checker.close()


def _regex(text: str) -> Constraint:
    return Constraint(Grammar(kind="regex", text=text), "guided_regex")


def test_the_next_client_goes_before_the_first_ones_second_grammar() -> None:
    order: list[str] = []

    async def check(checker: GrammarChecker, text: str, client: str) -> None:
        await checker.check(_regex(text), client)
        order.append(text)

    async def run(checker: GrammarChecker) -> None:
        first = asyncio.create_task(check(checker, "a1", "a"))
        await asyncio.sleep(0)  # it has left the queue
        await asyncio.sleep(0)
        await asyncio.gather(check(checker, "a2", "a"), check(checker, "b1", "b"), first)
        await asyncio.gather(check(checker, "a2", "a"), check(checker, "a1", "b"))

    _with_checker(run)
    assert order[:3] == ["a1", "a2", "b1"]
    assert sorted(order[3:]) == ["a1", "a2"]


def test_the_queue_is_bounded_for_each_client_and_in_all() -> None:
    async def run(checker: GrammarChecker) -> None:
        tasks = [asyncio.create_task(checker.check(_regex(f"x{n}"), f"client-{n % 6}")) for n in range(12)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in results if isinstance(error, ClusterError)]
        assert {error.status for error in refused} == {429, 503}
        assert all(error.retry_after_s for error in refused)
        assert None in results
        await checker.check(_regex("later"), "client-0")

    _with_checker(run)


def test_a_refusal_is_remembered_and_names_the_field() -> None:
    async def run(checker: GrammarChecker) -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"guided_regex cannot be followed: .*unclosed group") as refused:
                await checker.check(_regex("(a"), "")
            assert (refused.value.status, refused.value.param) == (400, "guided_regex")
        assert len(checker._known) == 1

    _with_checker(run)


def test_a_lost_sandbox_is_an_error_of_the_server_and_not_remembered() -> None:
    async def run(checker: GrammarChecker) -> None:
        await checker.warm_up(delay_s=0.0)
        checker._pool._idle[0].kill()
        with pytest.raises(ClusterError, match="could not be checked: its sandbox was killed") as lost:
            await checker.check(_regex("a"), "")
        assert (lost.value.status, lost.value.retry_after_s) == (503, 1.0)
        await checker.check(_regex("a"), "")

    _with_checker(run)


def test_a_closed_checker_refuses_at_once() -> None:
    async def run(checker: GrammarChecker) -> None:
        checking = asyncio.create_task(checker.check(_regex("((a{1000}){1000}){1000}"), ""))
        await checker.check(_regex("a"), "")
        waiting = asyncio.create_task(checker.check(_regex("b"), ""))
        await asyncio.sleep(0)  # it is in the queue, behind the first one
        checker.close()
        for each in (checking, waiting, asyncio.create_task(checker.check(_regex("c"), ""))):
            with pytest.raises(RequestError):
                await asyncio.wait_for(each, 30)

    _with_checker(run)


def test_a_model_that_is_unloaded_before_its_warm_up_is_no_bug() -> None:
    async def run(checker: GrammarChecker) -> None:
        warming = asyncio.create_task(checker.warm_up(delay_s=0.0))
        checker.close()
        await warming

    _with_checker(run)


def test_a_system_that_starts_no_thread_fails_the_checks_instead_of_leaving_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every later request with the same grammar would wait for its check, too."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def run(checker: GrammarChecker) -> None:
        with monkeypatch.context() as full:
            full.setattr(checker._threads, "submit", refuse)
            checks = [asyncio.wait_for(checker.check(_regex(text), text), 20) for text in "ab"]
            refused = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(error) for error in refused] == [ClusterError] * 2
        assert all("could not be checked: can't start new thread" in str(error) for error in refused)
        await checker.check(_regex("a"), "")

    _with_checker(run)
