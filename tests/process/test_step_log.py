"""The log of steps that a real server's workers write, and that a cost model is fitted to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.types import StepShape, WorkerId
from baton.decide.cost.fitted import read_step_log
from baton.serve.worker.step_log import StepLogWriter, prepare_step_log
from tests.serving import serving


def test_every_worker_writes_down_its_steps(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(f'step_log = "{tmp_path}/steps"\n')
    with serving("hash", "--config", str(config)) as server:
        with server.client() as client:
            body = {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert server.stop() == 0
    prefill, decode = (read_step_log(tmp_path / "steps" / f"{role}-0.jsonl") for role in ("prefill", "decode"))
    assert sum(step.prefill_tokens for step in prefill) == answer["usage"]["prompt_tokens"]
    assert [step.decode_requests for step in decode] == [1] * 5, "the first of six tokens is prefill's"
    assert all(0 < step.engine_s <= step.step_s for step in (*prefill, *decode)), "a turn is more than its forward pass"


def test_a_log_ends_at_its_bound_and_what_was_cut_off_is_left_out(tmp_path: Path) -> None:
    log = StepLogWriter(tmp_path, WorkerId("w"), bytes_max=400)
    for place in range(20):
        log.note(StepShape(decode_requests=1, context_tokens=place), at_s=place, engine_s=0.01, turn_s=0.02)
    log.close()
    path = tmp_path / "w.jsonl"
    assert path.stat().st_size <= 400
    steps = read_step_log(path)
    assert [step.context_tokens for step in steps] == list(range(len(steps)))
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read_step_log(path)) == len(steps) - 1


def test_what_is_no_step_log_is_told(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="is no step log"):
        read_step_log(path)
    with pytest.raises(ConfigError, match="choose another step_log"):
        prepare_step_log(path / "below")


def test_a_disk_that_fails_ends_the_log_with_one_line_and_not_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that restarts on a full or read-only disk must not be given up for its log."""
    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="baton.worker"):
        full = StepLogWriter(tmp_path, WorkerId("a"), bytes_max=1 << 20)
        unwritable = StepLogWriter(tmp_path / "file", WorkerId("b"), bytes_max=1 << 20)
        for place in range(2000):  # more than the buffer
            for log in (full, unwritable):
                log.note(StepShape(decode_requests=1), at_s=place, engine_s=0.01, turn_s=0.02)
        full.close()
        unwritable.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(";")[0] for line in lines] == [
        f"the step log {tmp_path / 'file' / 'b.jsonl'} ends here: [Errno 17] File exists: '{tmp_path / 'file'}'",
        f"the step log {tmp_path / 'a.jsonl'} ends here: [Errno 28] No space left on device",
    ]
