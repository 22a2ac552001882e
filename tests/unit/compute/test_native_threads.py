"""Threads of the native engine: none for an engine of one thread, one core each, and asleep between steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.move.compiling import find_compiler

ROOT = Path(__file__).resolve().parents[3]


BLIND = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <pthread.h>
int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t* set) {
    (void)thread;
    CPU_ZERO_S(size, set);
    CPU_SET_S(0, size, set);
    return EINVAL;
}
"""
"""A preloaded library whose sched_getaffinity fails and leaves garbage, as if the set had too few bits."""


def _output_of(script: str, **environment: str) -> str:
    command = [sys.executable, "-m", f"tests.unit.compute.{script}"]
    given = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, object]:
    return json.loads(_output_of("native_threads"))


def test_an_engine_of_one_thread_starts_none(seen: dict[str, object]) -> None:
    """So two workers of one thread, each pinned to a core, do not wait for each other."""
    assert seen["started_by_one"] == 0


def test_an_idle_helper_takes_no_cpu_time(seen: dict[str, object]) -> None:
    """A sleeping helper does not run until the next step."""
    assert seen["idle_ns"] == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")
def test_a_helper_is_pinned_and_the_caller_is_not(seen: dict[str, object]) -> None:
    """Threads that Python starts later inherit the caller's cores, and must be able to use all of them."""
    cores = seen["cores"]
    assert isinstance(cores, list)
    assert seen["helper_on"] == cores[1:]
    assert set(cores) <= set(seen["main_on"])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")
def test_a_caller_with_unknown_cores_is_not_pinned(tmp_path: Path) -> None:
    """Otherwise it would be moved to random cores after the step."""
    source, library = tmp_path / "blind.c", tmp_path / "blind.so"
    source.write_text(BLIND)
    subprocess.run([find_compiler(), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    seen = json.loads(_output_of("native_threads", LD_PRELOAD=str(library)))
    assert seen["main_on"] == sorted(os.sched_getaffinity(0))


def test_a_failure_to_start_threads_is_an_error() -> None:
    """The process continues. It would be terminated if threads that did start were not joined."""
    assert _output_of("native_crowd").startswith("the native engine refused a call: ")
