"""Bodies for vLLM and the reading of its metrics, without a server."""

from __future__ import annotations

from baton.core.types import Sampling
from baton.integrations.engines.http import error_text, event_data
from baton.integrations.engines.port import Generation
from baton.integrations.vllm.wire import completions_body, generate_body, read_load

SAMPLED = Sampling(temperature=0.7, seed=11, stop_token_ids=(5,), output_tokens_min=6, logit_bias=((3, -100.0),))


def generation(*, output_tokens: int = 0, sampling: Sampling = SAMPLED, hands_off: bool = False) -> Generation:
    tokens = list(range(10 + output_tokens))
    return Generation(
        id="r-1-0", tokens=tokens, output_tokens=output_tokens, tokens_max=20, sampling=sampling, hands_off=hands_off
    )


def test_a_continued_answer_keeps_its_minimum_and_draws_other_numbers() -> None:
    first = generate_body(generation(), "m", stream=True)["sampling_params"]
    later = generate_body(generation(output_tokens=4), "m", stream=True)["sampling_params"]
    assert (first["min_tokens"], later["min_tokens"]) == (6, 2)
    assert (first["seed"], later["seed"]) == (11, 15)
    assert first["stop_token_ids"] == [5]
    assert first["ignore_eos"] is True
    assert first["logit_bias"] == {"3": -100.0}


def test_greedy_requests_have_no_seed() -> None:
    """A seed of its own makes vLLM sample each request apart, which is slower."""
    body = generate_body(generation(sampling=Sampling(temperature=0.0, seed=11)), "m", stream=True)
    assert body["sampling_params"]["seed"] is None


def test_the_prompt_of_a_handoff_asks_for_one_token_that_no_rule_ends() -> None:
    body = generate_body(generation(hands_off=True), "m", stream=False)
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"], sampling["stop_token_ids"]) == (1, 0, [])
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert body["stream"] is False


def test_both_interfaces_get_the_same_parameters() -> None:
    whole = generate_body(generation(), "m", stream=True)
    flat = completions_body(generation(), "m", stream=True)
    assert flat["prompt"] == whole["token_ids"]
    assert {name: flat[name] for name in whole["sampling_params"] if name != "detokenize"} == {
        name: value for name, value in whole["sampling_params"].items() if name != "detokenize"
    }


def test_the_load_of_several_engine_cores_is_added_up() -> None:
    metrics = "\n".join(
        [
            "# HELP x",
            "process_start_time_seconds 1.5e+09",
            *(f'vllm:num_requests_waiting{{engine="{core}"}} {core + 1}.0' for core in range(2)),
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0',
            *(f'vllm:kv_cache_usage_perc{{engine="{core}"}} 0.5' for core in range(2)),
            *(
                f'vllm:cache_config_info{{block_size="128",engine="{core}",num_gpu_blocks="10"}} 1.0'
                for core in range(2)
            ),
        ]
    )
    load = read_load(metrics)
    assert (load.waiting_requests, load.kv_used_ratio, load.kv_tokens) == (3, 0.5, 2560)
    assert load.started_unix_s == 1.5e9


def test_values_that_are_no_finite_numbers_are_left_out() -> None:
    """A proxy before a server may answer anything, and the server is checked again."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    bad = "\n".join(f"vllm:{name} {value}" for name, value in zip(names, ("NaN", "+Inf", "none"), strict=True))
    load = read_load(bad + "\nvllm:num_requests_waiting 3\nprocess_start_time_seconds NaN\n")
    assert (load.running_requests, load.waiting_requests, load.kv_used_ratio) == (0, 3, 0.0)


def test_metrics_without_a_cache_size_say_so() -> None:
    load = read_load('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n')
    assert load.kv_tokens == 0


def test_lines_of_a_stream() -> None:
    assert event_data(b'data: {"choices": []}\n') == b'{"choices": []}'
    assert event_data(b"data: [DONE]\n") is None
    assert event_data(b": ping\n") is None
    assert event_data(b"\n") is None


def test_texts_of_errors_are_one_bounded_line() -> None:
    assert error_text(b'{"error": {"message": "two\\nlines"}}') == "two lines"
    assert error_text(b"<html>" + b"x" * 1000) == ("<html>" + "x" * 1000)[:300]
    assert error_text(b"") == "an empty body"
