"""A sandbox ends at its limits with the reason, and the next job gets an answer."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from baton.compute.hash_engine import hash_card
from baton.compute.models.chat_template import ChatInput
from baton.compute.sandbox.messages import GrammarChecks, GrammarProblem, SandboxSetup
from baton.compute.sandbox.process import ForkServer, Sandbox, SandboxError, SandboxPool
from baton.compute.sandbox.template import SandboxedTemplate
from baton.core.config import SandboxConfig
from baton.core.errors import ModelError, RequestError
from baton.core.types import Grammar

LIMITS = SandboxConfig(cpu_s=0.5, memory_bytes=64 << 20)
HELLO = [{"role": "user", "content": "hi"}]


def chain(links: int, wrap: str = "") -> str:
    """Return a schema with a chain of references."""
    refs = [{"$ref": f"#/$defs/d{link + 1}"} for link in range(links)]
    bodies = [{"anyOf": [ref, {"type": "null"}]} if wrap else ref for ref in refs]
    names = {f"d{link}": body for link, body in enumerate(bodies)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**names, f"d{links}": {"type": "string"}}})


HOSTILE = {
    "anyOf chain": (Grammar(kind="json_schema", text=chain(1800, "anyOf")), "too deeply|more than 10 s"),
    "reference chain": (Grammar(kind="json_schema", text=chain(4000)), "too deeply"),
    "nested properties": (
        Grammar(kind="json_schema", text='{"properties":{"a":' * 1900 + "{}" + "}}" * 1900),
        "too deeply|recursion",
    ),
    "rules of Lark": (
        Grammar(kind="grammar", text="".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"\nstart: r0\n'),
        "too deeply",
    ),
    "many optional letters": (Grammar(kind="regex", text="a?" * 20000), "CPU time|memory|too big"),
    "reference to itself": (Grammar(kind="json_schema", text='{"$ref": "#"}'), "matches no text"),
}


@pytest.fixture(scope="module")
def checks() -> Iterator[SandboxPool]:
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS), 1)
    yield pool
    pool.close()


def _problem(pool: SandboxPool, grammar: Grammar) -> str:
    answer = pool.call(msgspec.msgpack.encode([grammar]))
    problem = msgspec.msgpack.decode(answer, type=GrammarProblem | None)
    return "" if problem is None else problem.reason


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_checked(checks: SandboxPool, name: str) -> None:
    """Each of these ends a process without limits, or takes it for many seconds."""
    grammar, reason = HOSTILE[name]
    try:
        found = _problem(checks, grammar)
    except SandboxError as error:
        found = str(error)
    assert any(part in found for part in reason.split("|")), found
    assert _problem(checks, Grammar(kind="regex", text="[a-c]{2}")) == ""


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SandboxConfig(cpu_s=0.05), r"more than 0.05 s of CPU time; simplify it, or raise sandbox\.cpu_s"),
        (SandboxConfig(wall_s=0.05), r"more than 0.05 s; simplify it, or raise sandbox\.wall_s"),
        (
            SandboxConfig(memory_bytes=1 << 24),
            r"more than 16 MiB of memory; .* sandbox\.memory_bytes",
        ),
    ],
)
def test_the_reason_names_the_limit_and_its_setting(limits: SandboxConfig, reason: str) -> None:
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), limits), 1)
    with pytest.raises(SandboxError, match=reason):
        _problem(pool, Grammar(kind="regex", text="((a{1000}){1000}){1000}"))
    pool.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=[1]) %}{% for i in range(900) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for m in messages %}{{ '%1000000000d' % 1 }}{% endfor %}",
        "{% for m in messages %}{{ messages | tojson(indent=1000000000) }}{% endfor %}",
        "{{ '{:>99999999999}'.format(messages | length) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages | tojson }}{% endfor %}{% endfor %}",
        "{{ (messages[0].content * 4000000) | list | sort | join('y') | length }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_takes_all_memory_or_time_fails_its_request_alone(source: str) -> None:
    template = SandboxedTemplate("{% if add_generation_prompt %}fine{% else %}" + source + "{% endif %}", {}, LIMITS)
    limits = r"sandbox\.memory_bytes|sandbox\.cpu_s|200000 steps|nested too deeply"
    with pytest.raises(RequestError, match=limits) as refused:
        template.render(ChatInput(HELLO, add_generation_prompt=False))
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert template.render(ChatInput(HELLO)) == "fine"
    template.close()


def test_numbers_of_any_size_reach_a_template() -> None:
    template = SandboxedTemplate("{{ messages[0].number }}", {}, LIMITS)
    assert template.render(ChatInput([{"number": 10**30}])) == str(10**30)
    template.close()


@pytest.mark.parametrize("source", ["{% for %}", "{{ '%1000000000d' % 1 }}{% if"])
def test_a_template_that_cannot_be_compiled_is_found_at_the_start(source: str) -> None:
    template = SandboxedTemplate(source, {}, LIMITS)
    with pytest.raises(ModelError):
        template.compile()
    template.close()


def test_a_lost_sandbox_or_fork_server_is_replaced() -> None:
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS), 1)
    digits = Grammar(kind="regex", text="[0-9]")
    assert _problem(pool, digits) == ""
    sandbox = pool._idle[0]
    sandbox.kill()
    with pytest.raises(SandboxError) as lost:
        _problem(pool, digits)
    assert not lost.value.is_lasting
    assert _problem(pool, digits) == ""
    assert pool._idle[0].pid != sandbox.pid
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(sandbox.pid, 0)


def test_a_sandbox_without_a_job_ends_and_the_next_job_gets_another() -> None:
    """So the memory that its earlier jobs have left goes back to the system."""
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS, idle_s=0.2), 1)
    digits = Grammar(kind="regex", text="[0-9]")
    assert _problem(pool, digits) == ""
    sandbox = pool._idle[0]
    select.select([sandbox._sock], [], [])
    assert _problem(pool, digits) == ""
    assert pool._idle[0].pid != sandbox.pid
    pool.close()


def test_a_closed_pool_starts_no_process() -> None:
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS), 1)
    pool.close()
    with pytest.raises(SandboxError, match="it was closed"):
        pool.warm_up()
    assert pool._server._process is None


def test_a_close_does_not_wait_for_a_process_that_starts() -> None:
    """The server would stop a second later. Whichever is first, no process is left."""
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS), 1)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(pool.warm_up)
        while pool._server._process is None and not starting.done():
            pass
        started = pool._server._process
        pool.close()
        assert isinstance(starting.exception(), SandboxError)
    assert started is not None
    assert started.returncode is not None


def test_a_sandbox_sees_no_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret")
    pool = SandboxPool(SandboxSetup(GrammarChecks(hash_card()), LIMITS), 1)
    pool.warm_up()
    assert b"secret" not in Path(f"/proc/{pool._idle[0].pid}/environ").read_bytes()
    pool.close()


def _fork_server_of(sandbox: Sandbox) -> int:
    """Return the pid of the process that has forked a sandbox."""
    status = Path(f"/proc/{sandbox.pid}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def test_the_end_of_a_sandbox_of_an_earlier_fork_server_leaves_the_new_one_alone() -> None:
    server = ForkServer(SandboxSetup(GrammarChecks(hash_card()), LIMITS))
    old = server.fork()
    os.kill(_fork_server_of(old), signal.SIGKILL)
    new = server.fork()
    error = server.end_reason(old)
    assert error is not None
    assert not error.is_lasting
    assert _fork_server_of(server.fork()) == _fork_server_of(new)
    server.close()


def test_a_process_without_free_descriptors_refuses_a_sandbox_and_keeps_the_others() -> None:
    server = ForkServer(SandboxSetup(GrammarChecks(hash_card()), LIMITS))
    first = server.fork()
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(SandboxError, match="too many open files") as refused:
            server.fork()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not refused.value.is_lasting
    assert _fork_server_of(server.fork()) == _fork_server_of(first)
    server.close()
