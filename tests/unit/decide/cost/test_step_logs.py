"""What workers wrote down of their steps is a cost model: one log, a folder of them, a profile or a saved fit."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from baton.core.errors import ConfigError
from baton.core.types import StepShape, WorkerId
from baton.decide.cost.fitted import POINTS_MIN, StepPoint, StepProfile, fit_cost, read_fitted, save_fitted
from baton.decide.cost.load import inline_files, load_cost
from baton.serve.worker.step_log import StepLogWriter

SHAPE = StepShape(decode_requests=4, context_tokens=2000)


def points(count: int, seed: int = 0) -> list[StepPoint]:
    draw, made = random.Random(seed), []
    for _ in range(count):
        requests = draw.randrange(1, 9)
        context = requests * draw.randrange(10, 900)
        step_s = 0.01 + 0.001 * requests + 2e-6 * context
        made.append(StepPoint(decode_requests=requests, context_tokens=context, step_s=step_s))
    return made


def write_log(folder: Path, worker: str, written: list[StepPoint]) -> Path:
    """As a worker does it."""
    log = StepLogWriter(folder, WorkerId(worker), 1 << 20)
    for number, point in enumerate(written):
        log.note(point, at_s=float(number), engine_s=point.step_s * 0.9, turn_s=point.step_s)
    log.close()
    return folder / f"{worker}.jsonl"


def test_logs_of_a_server_are_fitted(tmp_path: Path) -> None:
    write_log(tmp_path, "decode-0", points(80))
    write_log(tmp_path, "decode-1", points(80, seed=1))
    cost = load_cost({"model": "fitted", "file": tmp_path.name}, folder=tmp_path.parent).cost
    assert cost.step_s(SHAPE) == pytest.approx(0.01 + 0.004 + 2e-6 * 2000, rel=0.02)


def test_a_log_a_profile_and_a_saved_fit_say_the_same(tmp_path: Path) -> None:
    log = write_log(tmp_path, "mixed-0", points(80))
    profile = StepProfile(engine="step logs", llm="", machine=str(log), points=tuple(points(80)))
    expected = fit_cost(profile)
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile))
    (tmp_path / "fit.json").write_text(save_fitted(expected))
    for name in ("mixed-0.jsonl", "profile.json", "fit.json"):
        assert msgspec.structs.replace(read_fitted(tmp_path / name), noise=None) == expected, name


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    log = write_log(tmp_path, "mixed-0", points(80))
    whole = read_fitted(log)
    with log.open("ab") as file:
        file.write(b'{"prefill_tokens":3,"step')
    assert read_fitted(log) == whole


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("few.jsonl", "", f"0 steps in 1 step logs, and a fit needs {POINTS_MIN}"),
        ("junk.jsonl", "{}\n", "not a step log"),
        ("other.json", "{}", "not a fitted cost model"),
        ("none.json", None, "cannot read the prices of steps: No such file"),
    ],
)
def test_what_is_none_of_them_is_told(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_fitted(tmp_path / name)


def test_a_settled_section_says_the_same_when_the_logs_have_been_begun_anew(tmp_path: Path) -> None:
    """A server's workers, hosts that join and the replay of its log read it later than the server, or elsewhere."""
    write_log(tmp_path, "mixed-0", points(80))
    raw = {"model": "fitted", "file": "mixed-0.jsonl"}
    kinds = {"model": "fitted", "kinds": {"old": {"file": "mixed-0.jsonl"}, "new": {"model": "linear"}}}
    expected = load_cost(raw, folder=tmp_path).cost
    told = [inline_files(each, folder=tmp_path) for each in (raw, kinds)]
    write_log(tmp_path, "mixed-0", [])
    with pytest.raises(ConfigError, match="0 steps"):
        load_cost(raw, folder=tmp_path)
    alone, several = (
        load_cost(msgspec.msgpack.decode(msgspec.msgpack.encode(each)), folder=Path("elsewhere")).cost for each in told
    )
    assert alone == several.on("old") == expected


def test_a_fit_is_named_or_given_and_has_a_price_for_every_band(tmp_path: Path) -> None:
    fit = msgspec.to_builtins(read_fitted(write_log(tmp_path, "mixed-0", points(80))))
    for wrong in ({}, {"file": "mixed-0.jsonl", "fit": fit}):
        with pytest.raises(ConfigError, match="cost: a fitted model has one of `file` and `fit`"):
            load_cost({"model": "fitted", **wrong}, folder=tmp_path)
    with pytest.raises(ConfigError, match="prices in band_s, this one has 1"):
        load_cost({"model": "fitted", "fit": {**fit, "band_s": [1.0]}}, folder=tmp_path)
