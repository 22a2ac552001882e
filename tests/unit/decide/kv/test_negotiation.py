"""Two hosts meet: what they agree on, and what the one that has to act is told where they do not."""

from __future__ import annotations

import msgspec
import pytest

from baton.decide.kv.conversion import Conversion, IncompatibleKV, KVForm, negotiate
from baton.decide.kv.identity import KVIdentity
from baton.decide.kv.layout import KVLayout

MODEL = KVIdentity(
    model="tiny", architecture="llama", rope="base 10000", config="c0ffee", tokenizer="70c0", weights="3e19"
)
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=16, dtype="bfloat16")
FORM = KVForm(identity=MODEL, layout=LAYOUT)


def laid(**fields: object) -> KVForm:
    return KVForm(identity=MODEL, layout=msgspec.structs.replace(LAYOUT, **fields))


def of_model(**fields: object) -> KVForm:
    return KVForm(identity=msgspec.structs.replace(MODEL, **fields), layout=LAYOUT)


def refused(target: KVForm, *, lossy_allowed: bool = True) -> str:
    answer = negotiate(FORM, target, lossy_allowed=lossy_allowed)
    assert isinstance(answer, IncompatibleKV)
    return answer.reason


@pytest.mark.parametrize(
    "target",
    [
        FORM,
        laid(block_tokens=24),
        laid(tensor_parallel=8, pipeline_parallel=3),
        laid(order="head_major"),
        laid(dtype="float32"),
        of_model(model="another name of the same files"),
    ],
)
def test_what_loses_nothing_needs_no_permission(target: KVForm) -> None:
    answer = negotiate(FORM, target, lossy_allowed=False)
    assert isinstance(answer, Conversion)
    assert (answer.source, answer.target, answer.loss) == (FORM.layout, target.layout, "")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (of_model(architecture="qwen2"), "architecture llama and qwen2"),
        (of_model(rope="base 500000"), "rotary positions base 10000 and base 500000"),
        (of_model(rope=""), "rotary positions base 10000 and none"),
        (of_model(config="beef"), "configuration c0ffee and beef"),
        (of_model(tokenizer="1234"), "tokenizer 70c0 and 1234"),
        (of_model(weights="5555"), "weights 3e19 and 5555"),
        (laid(layers=5), "layers 4 and 5"),
        (laid(kv_heads=4), "KV heads 2 and 4"),
        (laid(head_dim=16), "values per head 8 and 16"),
        (laid(planes=1), "planes 2 and 1"),
        (laid(kv_heads=4, head_dim=4), "KV heads 2 and 4; values per head 8 and 4"),
    ],
)
def test_another_model_is_refused_with_both_values(target: KVForm, said: str) -> None:
    """However much is allowed."""
    reason = refused(target)
    assert said in reason
    assert "start both hosts with the same model files" in reason


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor_parallel": 3}, "2 KV heads cannot be shared by 3 ranks"),
        (
            {"tensor_parallel": 2, "context_parallel": 2},
            "--dcp 2 divides KV that several ranks hold, and --tp 2 holds it once; leave it out, or use --tp with a "
            "multiple of 2 from 4 on",
        ),
        (
            {"tensor_parallel": 8, "context_parallel": 3},
            "--dcp 3 does not divide the 4 ranks that hold a KV head; use a divisor",
        ),
        (
            {"tensor_parallel": 8, "context_parallel": 4, "block_tokens": 6},
            "blocks of 6 tokens cannot be shared by 4 ranks; use --block-tokens with a multiple of 4",
        ),
        ({"context_parallel": 0}, "context_parallel is 0, but must be at least 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(sizes: dict[str, int], said: str) -> None:
    assert said in refused(laid(**sizes))


def test_what_is_lost_is_said_and_has_to_be_allowed() -> None:
    reason = refused(laid(dtype="int8"), lossy_allowed=False)
    assert "the source keeps it in bfloat16, the target in int8" in reason
    assert "allow lossy conversion" in reason
    answer = negotiate(FORM, laid(dtype="int8"), lossy_allowed=True)
    assert isinstance(answer, Conversion)
    assert answer.loss == "KV went from bfloat16 to int8: each number was rounded to 1/127 of the largest of its head"


def test_bytes_of_the_hash_engine_are_no_numbers() -> None:
    assert "bfloat16, the target in uint8" in refused(laid(dtype="uint8"))
    bytes_alone = laid(dtype="uint8")
    assert isinstance(negotiate(bytes_alone, bytes_alone, lossy_allowed=False), Conversion)


def test_forms_travel_between_hosts() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FORM), type=KVForm) == FORM
