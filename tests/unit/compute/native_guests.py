"""Let the native engine use a neighbour's core: `native_guests.py`, in a separate process, because it pins itself.

The neighbour is a child process that owns the second core. It sleeps at first, then wakes a thousand times a second to
compute. Prints one line of JSON: the core and the priority of the guest, its CPU time while the neighbour slept, the
number of recalls after that, and whether a logit ever differed from those of one thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from types import FrameType

import numpy as np

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from tests.unit.compute.native_fuzz import Engine
from tests.unit.compute.native_models import BFLOAT16, DENSE, Shape, Weights
from tests.unit.compute.native_threads import ran_ns, state_of, threads

SHAPE = Shape(
    heads=6, kv_heads=3, head_dim=32, hidden=256, intermediate=512, vocab=97, windows=[0] * 8,
    number=BFLOAT16, kv_number=BFLOAT16, block_tokens=16, form=DENSE, biased=False, normed=False, steep=1.0,
)  # fmt: skip
TOKENS = 48
QUIET_STEPS = 40
STEPS_MAX = 20_000
"""The maximum number of steps until the neighbour wakes while the guest works."""
PULSE_S = 0.001
WORK = 10_000
"""Loop passes of the neighbour at each pulse: some tenths of a millisecond."""


def begin(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, PULSE_S, PULSE_S)


def wake(number: int, frame: FrameType | None) -> None:
    """Let `pause` return."""


def neighbour(core: int) -> None:
    """Sleep until the first signal; then wake at every pulse and compute."""
    os.sched_setaffinity(0, {core})
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGALRM, wake)
    print("ready", flush=True)
    while os.getppid() != 1:
        signal.pause()
        sum(range(WORK))


def watch(ours: int, theirs: int, child: subprocess.Popen[str]) -> dict[str, object]:
    rng = random.Random(0)
    prompt = [rng.randrange(SHAPE.vocab) for _ in range(TOKENS)]
    step = [(prompt, 0, [0, 1, 2])]
    weights, library = Weights(SHAPE, np.random.default_rng(0)), NativeLibrary(library_path())
    alone = Engine(library, weights, 3, 1)
    expected = alone.step(step).tobytes()
    os.sched_setaffinity(0, {ours})
    before = threads()
    host = Engine(library, weights, 3, 1, cores=[ours])
    guests = library.guests(host.handle)
    if not guests.add_guest(theirs):
        raise SystemExit("the system allows no guest")
    (guest,) = threads() - before
    same = all(host.step(step).tobytes() == expected for _ in range(QUIET_STEPS))
    quiet_ns = ran_ns(guest)
    child.send_signal(signal.SIGUSR1)
    steps = 0
    while steps < STEPS_MAX and not guests.recalls():
        same = same and host.step(step).tobytes() == expected
        steps += 1
    recalls = guests.recalls()
    child.kill()
    child.wait()
    while steps < 2 * STEPS_MAX and os.sched_getaffinity(guest) != {theirs}:  # it rests for half a second at most
        same = same and host.step(step).tobytes() == expected
        steps += 1
    while state_of(guest) != "S":
        os.sched_yield()
    ran = ran_ns(guest)
    sum(range(30 * WORK))
    found: dict[str, object] = {
        "same": same,
        "guest_on": sorted(os.sched_getaffinity(guest)),
        "guest_is_idle_class": os.sched_getscheduler(guest) == os.SCHED_IDLE,
        "main_on": sorted(os.sched_getaffinity(0)),
        "quiet_ns": quiet_ns,
        "recalls": recalls,
        "idle_ns": ran_ns(guest) - ran,
    }
    host.library.free(host.handle)
    alone.library.free(alone.handle)
    return found


def main() -> None:
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-m", "tests.unit.compute.native_guests", str(theirs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            print(json.dumps(watch(ours, theirs, child) | {"ours": ours, "theirs": theirs}))
        finally:
            child.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        neighbour(int(sys.argv[1]))
    else:
        main()
