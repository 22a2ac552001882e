"""OpenAI's files and batches: the official client against the real server, over a restart of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import Struct, structs

from baton.core.errors import ConfigError, RequestError
from baton.core.http_config import BatchesConfig
from baton.core.limits import LimitsConfig
from baton.core.types import Sampling
from baton.serve.http.batches.lines import LineCheck
from baton.serve.http.batches.routes import PART_HEAD_BYTES_MAX, PARTS_MAX, read_form
from baton.serve.http.batches.store import BatchStore, FileStore, Folder, StoredBatch, new_id
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext
from baton.serve.http.identity import NO_LIMITS, Identity
from baton.serve.http.prompts import Prompt, RequestMaker
from baton.serve.http.wire.files import Batch, Counts, ExpiresAfter, UploadForm
from baton.serve.http.wire.schemas import CompletionRequest, SloFields
from tests.serving import RunningServer, serving

CHAT = "/v1/chat/completions"
FOR_BATCHES = UploadForm(purpose="batch")


def line(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}


def question(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return line(number, **{"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields})


def as_file(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class Client:
    """The official client of a server, and what the tests ask of it."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)

    def start(self, lines: list[dict[str, Any]]) -> Any:
        file = self.api.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
        return self.api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def wait(self, batch_id: str, until: Callable[[Any], bool] | None = None) -> Any:
        """Wait until a batch has ended, or until another condition holds."""
        found: list[Any] = []

        def holds(_: dict[str, Any]) -> bool:
            found[:] = [self.api.batches.retrieve(batch_id)]
            ended = found[0].status in ("completed", "failed", "cancelled")
            return until(found[0]) if until is not None else ended

        self.server.wait_until(holds, reason=f"batch {batch_id}")
        return found[0]

    def results(self, file_id: str) -> dict[str, dict[str, Any]]:
        found = map(json.loads, self.api.files.content(file_id).text.splitlines())
        return {each["custom_id"]: each["response"] for each in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with serving("hash", "--mixed", "1", "--batch-folder", str(folder)) as server:
        yield Client(server)


def test_a_batch_has_the_answers_and_the_errors_of_its_requests(client: Client) -> None:
    lines = [question(number) for number in range(40)] + [question(40, temperature=9)]
    batch = client.wait(client.start(lines).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (41, 40, 1)
    answers = client.results(batch.output_file_id)
    assert set(answers) == {f"r{number}" for number in range(40)}
    same = client.api.chat.completions.create(
        model="hash",
        messages=lines[7]["body"]["messages"],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answers["r7"]["status_code"] == 200
    assert answers["r7"]["body"]["choices"][0]["message"]["content"] == same.choices[0].message.content
    errors = client.results(batch.error_file_id)
    assert errors["r40"]["status_code"] == 400
    assert errors["r40"]["body"]["error"]["param"] == "temperature"
    assert next(iter(client.api.batches.list(limit=1))).id == batch.id
    client.api.files.delete(batch.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.api.files.content(batch.output_file_id)


def test_a_batch_leaves_room_for_others_and_can_be_cancelled(client: Client) -> None:
    """16 of its long requests run at once, and a short one of another client ends before them."""
    batch = client.start([question(number, max_tokens=500) for number in range(64)])
    client.wait(batch.id, lambda each: each.status == "in_progress")
    done = client.api.chat.completions.create(model="hash", messages=[{"role": "user", "content": "now"}], max_tokens=4)
    assert done.choices
    assert client.api.batches.retrieve(batch.id).status == "in_progress"
    assert client.api.batches.cancel(batch.id).status == "cancelling"
    assert client.wait(batch.id).status == "cancelled"


def test_no_slo_applies_to_the_requests_of_a_batch(tmp_path: Path) -> None:
    """Admission by an SLO that no request can meet would reject all but one at a time."""
    config = tmp_path / "baton.toml"
    config.write_text("[slo]\nttft_s = 1e-6\ntpot_s = 1e-6\n")
    flags = ("--mixed", "1", "--config", str(config), "--batch-folder", str(tmp_path / "batches"))
    with serving("hash", *flags) as server:
        client = Client(server)
        lines = [question(number) for number in range(20)]
        lines += [question(number + 20, slo={"ttft_s": 1e-6}) for number in range(20)]
        assert client.wait(client.start(lines).id).request_counts.completed == 40
        assert server.metric("baton_requests_rejected_total", 'reason="slo"') == 0


def test_a_wrong_file_fails_with_its_lines(client: Client) -> None:
    lines = [question(1), question(1), {**question(2), "url": "/v1/completions"}, question(3, stream=True), {"a": 1}]
    batch = client.wait(client.start(lines).id)
    assert batch.status == "failed"
    assert [problem.line for problem in batch.errors.data] == [2, 3, 4, 5]
    assert "occurs twice" in batch.errors.data[0].message


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/batches", {"input_file_id": "file-0", "endpoint": CHAT}, 404, "there is no file"),
        ("/v1/batches", {"input_file_id": "file-0", "endpoint": "/v1/messages"}, 400, "endpoint must be"),
        ("/v1/batches/batch-0/cancel", {}, 404, "there is no batch"),
        ("/v1/files", {}, 415, "multipart/form-data"),
    ],
)
def test_wrong_requests_are_named(client: Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    response = httpx.post(f"{client.server.url}{path}", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def test_files_keep_their_purpose_and_only_those_for_batches_run(client: Client) -> None:
    content, files = as_file([question(1)]), client.api.files
    limit: Any = {"anchor": "created_at", "seconds": 3600}
    file = files.create(file=("notes.txt", content), purpose="user_data", expires_after=limit)
    assert (file.purpose, file.expires_at) == ("user_data", file.created_at + 3600)
    assert [each.id for each in files.list(purpose="user_data")] == [file.id]
    assert file.id not in [each.id for each in files.list(purpose="batch")]
    with pytest.raises(openai.BadRequestError, match="upload it again with purpose=batch"):
        client.api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wrong: Any = {"anchor": "created_at", "seconds": 5}
    with pytest.raises(openai.BadRequestError, match="3600"):
        files.create(file=("notes.txt", content), purpose="user_data", expires_after=wrong)
    unknown: Any = "other"
    with pytest.raises(openai.BadRequestError, match="purpose must be"):
        files.create(file=("notes.txt", content), purpose=unknown)
    files.delete(file.id)


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The first server is killed while the batch runs. No request is lost, and none is answered twice."""
    arguments = ("hash", "--mixed", "1", "--batch-folder", str(tmp_path))
    with serving(*arguments) as server:
        client = Client(server)
        batch = client.start([question(number, max_tokens=60) for number in range(150)])
        client.wait(batch.id, lambda each: 20 <= each.request_counts.completed < 150)
        server.process.kill()
        server.process.wait()
    [output] = tmp_path.glob("batch-*.output")
    before = output.read_bytes()
    output.write_bytes(before + b'{"id": "torn')
    with serving(*arguments) as server:
        client = Client(server)
        ended = client.wait(batch.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 150)
        text = client.api.files.content(ended.output_file_id).text
        assert text.startswith(before.decode())
        assert sorted(json.loads(each)["custom_id"] for each in text.splitlines()) == sorted(
            f"r{n}" for n in range(150)
        )


@pytest.mark.parametrize(("asked", "given"), [(None, 2**30), (-5, 2**30), (2**30 + 1, 2**30 + 1)])
def test_requests_of_a_batch_come_after_all_others(asked: int | None, given: int) -> None:
    budget = Budgets(LimitsConfig()).begin("me", NO_LIMITS, is_counted=False, now_s=0.0)
    context = RequestContext("r", 0.0, Identity(), "me", budget, SloFields(), CHAT, {}, is_offline=True)
    maker = RequestMaker(context, CompletionRequest(prompt="a", priority=asked), 0)
    assert maker.make(0, Prompt([5], None), Sampling(), 9).priority == given


# ---- the store and the parsers


def test_responses_of_requests_with_long_odd_ids_are_read_by_their_own_ids(client: Client) -> None:
    ids = ["long/" * 25 + end for end in ("a\nb", "c/d")]
    lines = [{**line(0, input=custom_id, max_output_tokens=4), "custom_id": custom_id} for custom_id in ids]
    lines = [{**each, "url": "/v1/responses"} for each in lines]
    file = client.api.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
    made = client.api.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    results = client.results(client.wait(made.id).output_file_id)
    answers = [results[custom_id]["body"] for custom_id in ids]
    assert len({answer["id"] for answer in answers}) == 2
    for answer in answers:
        assert client.api.responses.retrieve(answer["id"]).output_text == answer["output"][0]["content"][0]["text"]


def stored(number: int, status: str = "completed") -> StoredBatch:
    made = Batch(
        id=new_id("batch"),
        endpoint=CHAT,
        input_file_id="file-x",
        completion_window="24h",
        created_at=number,
        status=status,  # type: ignore[arg-type]
        request_counts=Counts(1, 1, 0),
    )
    return StoredBatch(owner="me", key="k", tenant="t", cache_namespace="", batch=made)


def test_files_are_bounded_and_belong_to_their_owner(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    files = FileStore(folder, BatchesConfig(bytes_max=2000, files_max=2))
    kept = files.add("me", "a", b"x" * 1500, FOR_BATCHES)
    for size in (1000, 600):
        with pytest.raises(RequestError, match=r"batches\.bytes_max"):
            files.add("me", "b", b"x" * size, FOR_BATCHES)
    assert files.content("me", kept.id).read_bytes() == b"x" * 1500
    for wrong in (kept.id[:-1], "../lock", "file-" + "0" * 24):
        with pytest.raises(RequestError, match="there is no file"):
            files.get("me", wrong)
    with pytest.raises(RequestError, match="there is no file"):
        files.get("other", kept.id)
    with pytest.raises(ConfigError, match="another server uses it"):
        Folder(str(tmp_path))
    folder.close()
    Folder(str(tmp_path)).close()


class FullFolder(Folder):
    """On a disk that has no room for another record."""

    def write(self, record_id: str, record: Struct) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_upload_to_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its content would count towards the limits, and no client could delete it."""
    folder = FullFolder(str(tmp_path))
    with pytest.raises(RequestError, match="No space left on device") as refused:
        FileStore(folder, BatchesConfig()).add("me", "a", b"x", FOR_BATCHES)
    assert (refused.value.status, refused.value.code) == (507, "files_full")
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class WatchedFolder(Folder):
    """Notes whether the folder is locked whenever its batches are listed."""

    locked: tuple[bool, ...] = ()

    def all(self, prefix: str, kind: type[Any]) -> Iterator[Any]:
        self.locked += (self.lock.locked(),) if prefix == "batch" else ()
        return super().all(prefix, kind)


def test_no_file_is_deleted_while_an_upload_counts_the_files(tmp_path: Path) -> None:
    """The upload would fail, because a file is gone before its size is read."""
    folder = WatchedFolder(str(tmp_path))
    files = FileStore(folder, BatchesConfig())
    files.delete("me", files.add("me", "a", b"x", FOR_BATCHES).id)
    assert folder.locked == (True,)
    folder.close()


def test_an_expired_file_is_gone_unless_an_open_batch_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    files, batches = FileStore(folder, BatchesConfig(files_max=2)), BatchStore(folder, 9)
    form = UploadForm(purpose="batch", expires_after=ExpiresAfter(seconds=3600))
    used, unused = (files.add("me", name, b"x", form) for name in "ab")
    batch = stored(1, "in_progress")
    batches.add(structs.replace(batch, batch=structs.replace(batch.batch, input_file_id=used.id)))
    monkeypatch.setattr("baton.serve.http.batches.store.unix_s", lambda: used.created_at + 3600)
    assert [file.id for file in files.list("me")] == [used.id]
    with pytest.raises(RequestError, match="there is no file"):
        files.content("me", unused.id)
    assert files.content("me", used.id).read_bytes() == b"x"
    files.add("me", "c", b"x", FOR_BATCHES)  # in the place of the expired one
    assert not (tmp_path / f"{unused.id}.data").exists()
    folder.close()


def test_old_batches_are_forgotten_but_no_open_one(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    batches = BatchStore(folder, batches_max=2)
    for number in range(4):
        batches.add(stored(number, "in_progress" if number == 0 else "completed"))
    assert [each.batch.created_at for each in batches.list("me")] == [3, 0]
    batches.add(stored(5, "validating"))  # instead of the last ended one
    with pytest.raises(RequestError, match="2 batches are open") as refused:
        batches.add(stored(6, "validating"))
    assert refused.value.status == 429
    folder.close()


def test_a_temporary_folder_is_made_late_and_removed() -> None:
    folder = Folder("")
    files = FileStore(folder, BatchesConfig())
    assert files.list("me") == []
    path = files.content("me", files.add("me", "a", b"x", FOR_BATCHES).id)
    assert path.exists()
    folder.close()
    assert not path.parent.exists()
    with pytest.raises(RequestError, match="shutting down"):
        files.add("me", "a", b"x", FOR_BATCHES)


def test_a_form_is_read_byte_by_byte() -> None:
    content = b"a\r\n--B\xff\r\n\r\nb\r\n"
    parts = (
        b'--XYZ\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--XYZ\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: x\r\n\r\n'
    )
    raw = parts + content + b"\r\n--XYZ--\r\n"
    fields = read_form(raw, 'multipart/form-data; boundary="XYZ"')
    assert fields == {"purpose": ("", b"batch"), "file": ("in.jsonl", content)}
    for broken in (raw[:-8], b"", b"--XYZ"):
        with pytest.raises(RequestError, match="has no end"):
            read_form(broken, "multipart/form-data; boundary=XYZ")
    with pytest.raises(RequestError, match="no boundary"):
        read_form(raw, "multipart/form-data")


def test_a_form_of_many_parts_is_refused() -> None:
    """A form of 32 MB can have millions of parts, which take 300 MB."""
    part = b"--X\r\n\r\n\r\n"
    assert read_form(part * PARTS_MAX + b"--X--", "multipart/form-data; boundary=X") == {}
    with pytest.raises(RequestError, match="more than 16 parts"):
        read_form(part * (PARTS_MAX + 1) + b"--X--", "multipart/form-data; boundary=X")


def test_names_are_searched_only_at_the_begin_of_a_part() -> None:
    """The search in 32 MB of almost-names would take minutes, and no stream would go on meanwhile."""
    for filled, names in ((PART_HEAD_BYTES_MAX - 20, ["purpose"]), (PART_HEAD_BYTES_MAX, [])):
        raw = b"--X\r\n" + b" " * filled + b'; name="purpose"\r\n\r\nbatch\r\n--X--'
        assert [*read_form(raw, "multipart/form-data; boundary=X")] == names


def check(path: Path, *, lines_max: int = 3, body_bytes_max: int = 1 << 20) -> tuple[int, list[str]]:
    """Return the number of requests in an input file, and the codes of its problems."""
    count, problems = LineCheck(CHAT, lines_max, body_bytes_max).check(path)
    return count, [problem.code for problem in problems]


def test_a_file_of_too_many_requests_or_of_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(as_file([question(number) for number in range(3)]))
    assert check(path) == (3, [])
    assert check(path, lines_max=2) == (0, ["too_many_requests"])
    path.write_bytes(b"\n \n")
    assert check(path) == (0, ["empty_file"])
    path.write_bytes(b"\n" * 4)
    assert check(path) == (0, ["too_many_requests"])
    path.write_bytes(b"\xff\xfe\n" * 500)
    assert check(path)[1] == ["invalid_request"] * 100


def test_a_request_in_a_file_has_the_limits_of_one_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(as_file([question(1, user="x" * 5000), {**question(2), "custom_id": "x" * 600}]))
    [long_body, long_id] = LineCheck(CHAT, 9, 4000).check(path)[1]
    assert "at most 4000 are allowed (http.body_bytes_max)" in long_body.message
    assert "custom_id has 600 characters" in long_id.message
