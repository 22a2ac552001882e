"""Prefill and decode in different precisions on one host: each worker has its own weights, and KV has one type."""

from __future__ import annotations

from pathlib import Path

from tests.serving import serving

BODY = {"prompt": "The three primary colours are", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_each_phase_computes_in_its_own_precision(tmp_path: Path, tiny_model: str) -> None:
    """The first token is that of bfloat16 alone, because prefill draws it."""
    path = tmp_path / "baton.toml"
    path.write_text("[prefill]\ndtype = 'bfloat16'\n[decode]\nweights = 'int8'\n")
    texts: list[str] = []
    logs: list[str] = []
    for arguments in (("--config", str(path)), ("--dtype", "bfloat16")):
        with serving(tiny_model, *arguments) as server, server.client() as client:
            answer = client.post("/v1/completions", json=BODY | {"logprobs": 0}).json()
            texts.append(answer["choices"][0]["logprobs"]["tokens"][0])
            assert answer["usage"]["completion_tokens"] == 6
            assert answer["timings"]["decode_worker"] == "decode-0"
            logs.append(server.output())
    assert texts[0] == texts[1]
    assert "bfloat16, int8 weights" in logs[0]
    assert "int8" not in logs[1]
