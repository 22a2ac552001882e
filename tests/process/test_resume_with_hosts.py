"""A server restarts while its host stays: the host keeps its KV, and a resumed stream computes none of it again."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from tests.hosting import joining
from tests.process.lossy_wire import free_port
from tests.process.test_resume import Stream
from tests.serving import listening

PATH = "/v1/chat/completions"


def test_a_resumed_stream_reads_the_kv_that_its_host_has_kept(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(f'[survival]\ndrain_s = 0\nresume_folder = "{tmp_path / "streams"}"\n')
    given = ("hash", "--config", str(config), "--hosts", "1", "--port", str(free_port()))
    with ExitStack() as stack:
        with listening(*given) as server:
            host = stack.enter_context(joining(server.url, "a", "--mixed", "1", "--kv-blocks", "512"))
            server.wait_ready()
            with server.client() as client:
                before = Stream(client, PATH, {}).read(200)
                server.process.send_signal(signal.SIGTERM)
                before.read()
            assert server.process.wait(60) == 0
        with listening(*given) as server:
            server.wait_ready()
            with server.client() as client:
                after = Stream(client, PATH, {"x-baton-resume": before.error["resume_id"]}).read()
                usage, cached_tokens = after.last["usage"], after.last["timings"]["cached_tokens"]
                whole = Stream(client, PATH, {}).read()
            server.wait_output("with KV from before the restart")
            assert whole.text == before.text + after.text
            sent_tokens = len(before.text) * usage["completion_tokens"] // len(whole.text)
            assert cached_tokens > usage["prompt_tokens"] + sent_tokens // 2, "KV of the answer was computed again"
            server.wait_until(lambda state: state["hosts"][0]["kv_blocks_used"] == 0, reason="no block is used")
        assert host.process.poll() is None


def test_a_server_uses_no_table_from_before_the_host_served_another_server(tmp_path: Path) -> None:
    """The other server has written other KV into the blocks of the table."""
    port, answers, cached_tokens = free_port(), list[str](), list[int]()
    with ExitStack() as stack:
        for folder, prompt in (("one", "a" * 100), ("other", "b" * 100), ("one", "a" * 100)):
            config = tmp_path / f"{folder}.toml"
            config.write_text(f'[survival]\ndrain_s = 0\nresume_folder = "{tmp_path / folder}"\n')
            with listening("hash", "--config", str(config), "--hosts", "1", "--port", str(port)) as server:
                if not answers:
                    stack.enter_context(joining(server.url, "a", "--mixed", "1", "--kv-blocks", "64"))
                server.wait_ready()
                with server.client() as client:
                    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
                    answer = client.post("/v1/completions", json=body).raise_for_status().json()
                answers.append(answer["choices"][0]["text"])
                cached_tokens.append(answer["timings"]["cached_tokens"])
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(60) == 0
    assert answers[2] == answers[0] != answers[1]
    assert cached_tokens == [0, 0, 0]
