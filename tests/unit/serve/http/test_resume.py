"""Saved streams: private, bounded in number, bytes and time, resumed once, and only by their tenant."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.core.config import SurvivalConfig
from baton.core.errors import ConfigError, RequestError
from baton.serve.http import resume
from baton.serve.http.identity import Identity
from baton.serve.http.resume import Continuation, SavedStream, SavedStreams, owner_of
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder

ALICE, BOB = Identity(tenant="alice", cache_namespace="tenant:alice"), Identity(tenant="bob")
PATH = "/v1/completions"
STREAM = SavedStream(
    path=PATH,
    owner=owner_of(ALICE),
    body=b'{"prompt": "a"}',
    response_id="cmpl-1",
    seed=7,
    prompt_hash=b"hash",
    output=(70, 71),
    expires_unix_s=1 << 40,
)


def streams(folder: Path, **more: float) -> SavedStreams:
    config = replace(SurvivalConfig(resume_folder=str(folder / "streams")), **more)
    return SavedStreams(config, Recorder(Metrics()))


def files(folder: Path) -> list[Path]:
    return list((folder / "streams").iterdir())


def refusal(saved: SavedStreams, resume_id: str, owner: Identity = ALICE, path: str = PATH) -> str | None:
    with pytest.raises(RequestError, match=r"or survival\.resume_folder is not set") as raised:
        saved.take(resume_id, owner=owner_of(owner), path=path)
    assert (raised.value.status, raised.value.param) == (404, "x-baton-resume")
    return raised.value.code


def test_a_stream_is_resumed_once_and_by_its_tenant_and_route_only(tmp_path: Path) -> None:
    saved = streams(tmp_path)
    resume_id = saved.save(STREAM)
    assert refusal(saved, resume_id, BOB) == "unknown_resume_id"
    assert refusal(saved, resume_id, path="/v1/chat/completions") == "unknown_resume_id"
    assert streams(tmp_path).take(resume_id, owner=owner_of(ALICE), path=PATH) == STREAM, "after a restart"
    assert refusal(saved, resume_id) == "unknown_resume_id"
    assert files(tmp_path) == []
    assert refusal(SavedStreams(SurvivalConfig(), Recorder(Metrics())), resume_id) == "unknown_resume_id"


def test_files_are_private_and_their_names_are_no_ids(tmp_path: Path) -> None:
    resume_id = streams(tmp_path).save(STREAM)
    (file,) = files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert resume_id not in file.name
    assert len(resume_id) == 32


@pytest.mark.parametrize("resume_id", ["", "x", "../" * 10 + "ab", "a" * 32, "é" * 32])
def test_an_id_that_was_never_given_reads_no_file(resume_id: str, tmp_path: Path) -> None:
    (tmp_path / "ab").write_bytes(b"not a stream")
    assert refusal(streams(tmp_path), resume_id) == "unknown_resume_id"


def test_a_damaged_file_is_no_stream(tmp_path: Path) -> None:
    saved = streams(tmp_path)
    resume_id = saved.save(STREAM)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    assert refusal(saved, resume_id) == "unknown_resume_id"


def test_old_streams_are_refused_and_deleted(tmp_path: Path) -> None:
    saved = streams(tmp_path)
    resume_id = saved.save(replace(STREAM, expires_unix_s=1))
    assert refusal(saved, resume_id) == "unknown_resume_id"
    saved.save(STREAM)
    (old,) = files(tmp_path)
    os.utime(old, (1, 1))
    saved.save(STREAM)
    assert len(files(tmp_path)) == 1
    assert not old.exists()


def test_number_and_bytes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resume, "STREAMS_MAX", 2)
    saved = streams(tmp_path)
    assert [bool(saved.save(STREAM)) for _ in range(3)] == [True, True, False]
    assert "survival.resume_bytes_max" in caplog.text
    assert streams(tmp_path / "small", resume_bytes_max=10).save(STREAM) == ""


def test_a_stream_whose_continuation_did_not_begin_can_be_resumed_again(tmp_path: Path) -> None:
    saved = streams(tmp_path)
    resume_id = saved.save(STREAM)
    for has_begun in (False, True):
        taken = saved.take(resume_id, owner=owner_of(ALICE), path=PATH)
        asyncio.run(Continuation(resume_id, taken, saved).end(has_begun=has_begun))
    assert refusal(saved, resume_id) == "unknown_resume_id"


@pytest.mark.parametrize(("prompt_hash", "tokens_max"), [(b"other", 9), (b"hash", 2)])
def test_a_server_that_would_continue_otherwise_refuses(prompt_hash: bytes, tokens_max: int, tmp_path: Path) -> None:
    """With another tokenizer or template the tokens differ; with a smaller arena there may be no room for more."""
    continued = Continuation("id", STREAM, streams(tmp_path))
    continued.check(b"hash", 3)
    with pytest.raises(RequestError, match="cannot be resumed here") as raised:
        continued.check(prompt_hash, tokens_max)
    assert raised.value.status == 409


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "streams").write_text("a file")
    with pytest.raises(ConfigError, match="resume_folder: the folder"):
        streams(tmp_path)
