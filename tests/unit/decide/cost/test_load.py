"""Cost sections: what they give, and that bad ones say everything that is wrong, with numbers and what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.types import StepShape
from baton.decide.cost.catalog import all_hardware, hardware, model_shape, models
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.fitted import FittedCost, save_fitted
from baton.decide.cost.load import load_cost
from baton.decide.cost.model import shape_from_config
from baton.decide.cost.spec import IDEAL
from tests.unit.decide.cost.workers import decoding

HERE = Path()


def problems(raw: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_cost(raw, folder=HERE)
    return str(caught.value).splitlines()


def test_one_kind_of_worker_with_what_it_is() -> None:
    loaded = load_cost({"model": "roofline", "llm": "llama2-70b", "hardware": "A100-80G-SXM", "tp": 8}, folder=HERE)
    facts = loaded.kinds[""]
    assert facts.gpus == 8
    assert facts.kv_token_bytes == 320 * 1024
    assert facts.kv_tokens_max * facts.kv_token_bytes == pytest.approx(8 * 72 * 2**30 - 2 * 69e9, rel=0.05)
    assert facts.usd_per_hour == pytest.approx(17.7)
    assert facts.power_w == 6500


def test_kinds_share_what_they_do_not_say_and_answer_by_name() -> None:
    raw = {
        "model": "roofline", "llm": "meta-llama/Llama-2-70b-hf", "engine": "splitwise-vllm", "tp": 8,
        "kinds": {"old": {"hardware": "a100"}, "new": {"hardware": "h100", "tp": 4}},
    }  # fmt: skip
    loaded = load_cost(raw, folder=HERE)
    step = decoding(16, context=576)
    assert loaded.cost.on("old").step_s(step) > loaded.cost.on("new").step_s(step)
    assert loaded.cost.step_s(step) == loaded.cost.on("old").step_s(step), "without a worker: the first kind"
    assert {name: facts.gpus for name, facts in loaded.kinds.items()} == {"old": 8, "new": 4}


def test_every_problem_of_every_kind_at_once() -> None:
    found = problems(
        {
            "model": "roofline",
            "llm": "llama2-70b",
            "kinds": {"a": {"hardware": "a1000", "engin": ""}, "b": {"hardware": "h100"}, "c": {"model": "rooflin"}},
        }
    )
    text = "\n".join(found)
    assert "unknown key cost.kinds.a.engin (did you mean 'engine'?)" in text
    assert "cost.kinds.a: unknown hardware 'a1000'" in text
    assert "cost.kinds.b: llama2-70b does not fit H100-80G-SXM with tp 1" in text
    assert "cost.kinds.c.model is 'rooflin' (did you mean 'roofline'?)" in text


def test_experts_lie_on_no_more_gpus_than_there_are_of_them() -> None:
    """Half an expert a GPU would be read in half the time. What is advised can be built."""
    wide = {"model": "roofline", "llm": "mixtral-8x7b", "hardware": "h100", "dp": 16, "ep": 16}
    (line,) = problems(wide)
    assert "ep 16 is more than the 8 experts of mixtral-8x7b: try ep 8" in line
    assert load_cost({**wide, "ep": 8}, folder=HERE).cost.step_s(decoding(64, context=1000)) > 0
    (line,) = problems({**wide, "dp": 12, "ep": 12})
    assert "try ep 6" in line


def test_a_wire_within_a_host_is_refused_with_the_reason() -> None:
    section = {"model": "roofline", "llm": "llama3.1-8b", "hardware": "h100", "local_wire": {"bytes_per_s": 1e6}}
    (line,) = problems(section)
    assert line.startswith("cost.local_wire was removed: workers of one host share its arena and copy nothing")


def test_kinds_that_are_no_sections() -> None:
    assert problems({"kinds": {}}) == ["cost.kinds must name at least one kind of worker, each with its own section"]
    (line,) = problems({"kinds": {"a": 3}})
    assert line == "cost.kinds.a must be a section of its own, but is 3"


def test_a_model_that_does_not_fit_says_by_how_much_and_what_does() -> None:
    (line,) = problems({"model": "roofline", "llm": "llama2-70b", "hardware": "A100-80G-SXM"})
    assert "128.5 GiB of weights (bf16) per GPU" in line
    assert "72.0 of 80 GiB are usable" in line
    assert line.endswith("what fits: tp 2, or pp 2, or int8 weights")
    (line,) = problems({"model": "roofline", "llm": "llama2-70b", "hardware": "H100"})
    assert line.endswith("what fits: tp 2, or pp 2, or fp8 weights"), "which an A100 has no arithmetic for"


def test_what_is_said_to_fit_can_be_built() -> None:
    """A node of L40S has 8: 16 of them, which would hold the weights, are no tp."""
    raw: dict[str, object] = {"model": "roofline", "llm": "llama3.1-405b", "hardware": "l40s", "tp": 8}
    (line,) = problems(raw)
    assert line.endswith("what fits: pp 4, or int4 weights"), line
    assert load_cost({**raw, "pp": 4}, folder=HERE).kinds[""].gpus == 32


def test_a_draft_model_takes_its_share_of_the_memory() -> None:
    """Its weights, in bf16 here, and its KV of every token."""
    raw: dict[str, object] = {"model": "roofline", "llm": "llama2-70b", "hardware": "h100", "tp": 4}
    draft = model_shape("llama2-7b")
    alone = load_cost(raw, folder=HERE).kinds[""]
    drafted = load_cost({**raw, "draft": {"llm": "llama2-7b"}}, folder=HERE).kinds[""]
    left_bytes = alone.kv_tokens_max * alone.kv_token_bytes - draft.params * 2
    both_bytes = alone.kv_token_bytes + draft.kv_token_bytes()
    assert drafted.kv_tokens_max == pytest.approx(left_bytes / both_bytes, rel=0.01)


def test_a_draft_model_may_be_what_does_not_fit() -> None:
    raw = {"model": "roofline", "llm": "llama2-13b", "hardware": "a10g", "tp": 2, "draft": {"llm": "llama2-13b"}}
    (line,) = problems(raw)
    assert "llama2-13b with the draft model llama2-13b does not fit A10G-24G with tp 2" in line
    assert "no draft model, or a smaller one" in line
    assert load_cost({key: raw[key] for key in raw if key != "draft"}, folder=HERE).kinds[""].kv_tokens_max > 0


def test_nothing_fits_a_small_gpu() -> None:
    (line,) = problems({"model": "roofline", "llm": "deepseek-v3", "hardware": "l4"})
    assert "take a larger GPU" in line


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tp": 3}, "tp 3 does not divide the 64 heads of llama2-70b; try tp 2"),
        ({"tp": 0}, "tp is 0, but must be at least 1"),
        ({"tp": 4, "pp": 100}, "pp 100 is more than the 80 layers"),
        ({"tp": 4, "ep": 2}, "ep 2, but llama2-70b has no experts"),
        ({"tp": 4, "engine": "vlm-v1"}, "unknown engine 'vlm-v1' (did you mean 'vllm-v1'?)"),
        ({"tp": 4, "weights": "fp7"}, "cost.weights is 'fp7', but must be one of 'bf16'"),
        (
            {"tp": 4, "draft": {"llm": "llama3.1-8b", "acceptance_ratio": 2}},
            "acceptance_ratio is 2, but must be between 0",
        ),
        ({"tp": 32}, "tp 32 x cp 1 takes 32 GPUs of one node, and a node of A100-80G-SXM has 8: try tp 8, and pp"),
        ({"tp": 8, "cp": 2}, "tp 8 x cp 2 takes 16 GPUs of one node"),
        ({"tp": 4, "weights": "fp8"}, "A100-80G-SXM does not compute in fp8: try weights bf16 or int8"),
        ({"llm": "lama2-70b", "tp": 4}, "unknown model 'lama2-70b' (did you mean 'llama2-70b'?)"),
        ({"llm": "nowhere/config.json", "tp": 4}, "cannot read the model: No such file or directory"),
    ],
)
def test_what_a_section_may_get_wrong(extra: dict[str, object], said: str) -> None:
    raw = {"model": "roofline", "llm": "llama2-70b", "hardware": "a100", **extra}
    assert any(said in line for line in problems(raw)), problems(raw)


@pytest.mark.parametrize("profile", ["splitwise", "distserve", "vidur"])
def test_a_table_without_the_setting_says_what_it_has(profile: str) -> None:
    (line,) = problems({"model": "table", "profile": profile, "llm": "llama3.1-8b", "hardware": "h100", "tp": 8})
    assert "llm llama3.1-8b" in line
    assert "it has: " in line


def test_a_table_reads_its_own_points() -> None:
    cost = load_cost(
        {"model": "table", "profile": "splitwise", "llm": "llama2-70b", "hardware": "a100", "tp": 8}, folder=HERE
    ).cost
    assert cost.prefill_s(new_tokens=8192, cached_tokens=0) == pytest.approx((1.54982 + 2.084405) / 2)
    assert cost.step_s(decoding(64, context=576)) == pytest.approx(0.071605)
    assert cost.step_s(decoding(1, context=8256)) == pytest.approx(0.04651, rel=0.01)


def test_splitwise_sim_has_the_published_flaw() -> None:
    """A step of 64 requests: 42.8 ms looked up, 71.6 measured."""
    raw = {"model": "splitwise-sim", "llm": "llama2-70b", "hardware": "a100", "tp": 8}
    cost = load_cost(raw, folder=HERE).cost
    assert cost.step_s(decoding(64, context=576)) == pytest.approx(0.0428, abs=1e-4)
    capped = load_cost({**raw, "prompt_factor": 1.3}, folder=HERE).cost
    assert capped.prefill_s(new_tokens=512, cached_tokens=0) == 1.3 * cost.prefill_s(new_tokens=512, cached_tokens=0)
    mixed = StepShape(prefill_tokens=500, prefill_chunks=1, decode_requests=12)
    assert cost.step_s(mixed) == pytest.approx(1.1 * cost.prefill_s(new_tokens=512, cached_tokens=0))


def test_distserve_has_its_two_regimes_and_its_engine() -> None:
    raw = {"model": "table", "profile": "distserve", "llm": "opt-13b", "tp": 1}
    cost = load_cost(raw, folder=HERE).cost
    few, many = decoding(94, context=10), decoding(95, context=10)
    assert cost.step_s(few) * 1e3 == pytest.approx(19.9347 + 0.00062694 * 940 + 0.038507 * 94 + 2 + 0.094, rel=1e-4)
    assert cost.step_s(many) * 1e3 == pytest.approx(7.16619 + 0.0005798 * 950 + 0.158311 * 95 + 2 + 0.095, rel=1e-4)
    prompt_ms = 18.10255 + 0.101912 * 512 + 7.12226e-06 * 512**2 + 2
    assert cost.prefill_s(new_tokens=512, cached_tokens=0) * 1e3 == pytest.approx(prompt_ms, rel=1e-4)


def test_a_fit_is_read_from_its_file(tmp_path: Path) -> None:
    fit = FittedCost(start_s=0.01, band_s=(0.001,) * 5, sequence_s=0.0, decode_s=0.0, pair_s=0.0, context_token_s=0.0)
    (tmp_path / "fit.json").write_text(save_fitted(fit))
    cost = load_cost({"model": "fitted", "file": "fit.json"}, folder=tmp_path).cost
    assert cost.step_s(StepShape(decode_requests=10, context_tokens=100)) == pytest.approx(0.02)
    assert "cannot read" in problems({"model": "fitted", "file": "none.json"})[0]


def test_all_that_is_known_by_name_can_be_found_under_any_of_its_names() -> None:
    assert all(model_shape(name).problems() == [] for name in models())
    assert all(hardware(name).name == name for name in all_hardware())
    assert hardware("A100-80GB") is hardware("a100_sxm") is hardware("A100-80G-SXM")
    assert model_shape("meta-llama/Llama-3.1-8B-Instruct").name == "llama3.1-8b"


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama2-7b", 6.74, 6.74), ("llama2-70b", 69.0, 69.0), ("opt-175b", 175, 175), ("bloom-176b", 176.2, 176.2),
     ("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22),
     ("deepseek-v3", 671, 37.5), ("smollm2-135m", 0.1345, 0.1345)],
)  # fmt: skip
def test_weights_are_as_many_as_published(name: str, billions: float, active: float) -> None:
    shape = model_shape(name)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama2-70b", 320), ("llama3.1-8b", 128), ("opt-13b", 800), ("opt-66b", 2304), ("bloom-176b", 3920),
     ("deepseek-v3", 68.625)],
)  # fmt: skip
def test_kv_of_a_token_is_as_large_as_published(name: str, kib: float) -> None:
    assert model_shape(name).kv_token_bytes() == kib * 1024


def test_a_config_json_gives_the_same_shape_as_the_catalogue() -> None:
    mistral = """{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768}"""
    assert shape_from_config(mistral, name="mistral-7b") == model_shape("mistral-7b")
    opt = """{"model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 50272, "max_position_embeddings": 2048}"""
    assert shape_from_config(opt, name="opt-13b") == model_shape("opt-13b")
    deepseek = """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 128,
        "vocab_size": 129280, "topk_group": 4, "max_position_embeddings": 163840, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3}"""
    assert shape_from_config(deepseek, name="deepseek-v3") == model_shape("deepseek-v3")


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "not a JSON object"), ("{}", "none of the keys num_hidden_layers, n_layer"),
     ('{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 5, '
      '"num_key_value_heads": 2, "vocab_size": 9}',
      "5 heads cannot share 2 kv_heads evenly")],
)  # fmt: skip
def test_a_config_json_that_is_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_from_config(text, name="x")


def test_an_engine_without_a_profile_borrows_the_nearest_and_says_so() -> None:
    exact = engine_profile("splitwise-vllm", llm="llama2-70b", gpu=hardware("h100"), tp=4)
    assert exact.note == ""
    near = engine_profile("splitwise-vllm", llm="llama3.1-70b", gpu=hardware("h800"), tp=4)
    assert (near.decode, near.prompt) == (exact.decode, exact.prompt)
    assert "no profile of llama3.1-70b on H800-80G-SXM tp 4; that of llama2-70b on H100-80G-SXM tp 4" in near.note
    assert engine_profile("ideal", llm="opt-13b", gpu=hardware("l4"), tp=1) == IDEAL
