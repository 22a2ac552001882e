"""Many seeds under all checkers. A failing seed prints the one line that plays it again."""

from __future__ import annotations

import io

import pytest

from tests.campaign.run import main, play_seed, repeat_line, run_seeds
from tests.seeds import Seeds

CHUNKS = 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_seed_holds_the_invariants_with_faults(chunk: int, seeds: Seeds) -> None:
    """Workers die, hang, come back; messages are late or lost; clients hang up: INV-1 to INV-5, INV-7 to INV-9."""
    out = io.StringIO()
    failed = run_seeds(seeds.draw(56, deep=2400)[chunk::CHUNKS], faults=True, out=out)
    assert failed == 0, out.getvalue()


def test_every_seed_holds_the_invariants_without_faults(seeds: Seeds) -> None:
    """Nothing goes wrong, so nothing may fail either: only small arenas and full queues."""
    out = io.StringIO()
    assert run_seeds(seeds.draw(20, deep=300), faults=False, out=out) == 0, out.getvalue()


def test_every_seed_holds_the_invariants_with_http_clients(seeds: Seeds) -> None:
    """The real routes serve clients that read slowly, repeat ids and die, while workers and hosts die too."""
    out = io.StringIO()
    assert run_seeds(seeds.draw(12, deep=600), faults=True, clients=True, out=out) == 0, out.getvalue()


def test_http_clients_do_not_make_a_run_random() -> None:
    """INV-6: the tasks of clients and routes run in the order of the simulation."""
    assert play_seed(1, faults=True, clients=True) == play_seed(1, faults=True, clients=True)
    assert play_seed(1, faults=True, clients=True) != play_seed(1, faults=True)


def test_the_printed_line_plays_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """What a failure prints is a command that works."""
    words = repeat_line(7, faults=True).split()
    assert words[:3] == [".venv/bin/python", "-m", "tests.campaign.run"]
    assert main(words[3:]) == 0
    assert capsys.readouterr().out == ""


def test_a_campaign_says_how_many_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--first", "5", "--faults"]) == 0
    assert capsys.readouterr().out == "3 seeds, 0 failed\n"


def test_seeds_differ() -> None:
    assert play_seed(1, faults=True) != play_seed(2, faults=True)
