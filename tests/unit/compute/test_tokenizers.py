"""Tokenizers keep the text, stream whole characters, and never crash on unusual input."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from baton.compute.models.gguf_vocabulary import sentencepiece_backend
from baton.compute.models.grammar import token_trie
from baton.compute.models.grammar_masks import GrammarMasks
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from baton.compute.models.tokenizer_files import INLINE_CHARS_MAX, tokenizer_from_folder, tokenizer_from_gguf
from baton.compute.sandbox.messages import MaskJob
from baton.core.errors import ModelError, RequestError
from baton.core.types import Grammar, RequestId
from tests.unit.compute.models import close_gguf


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module", params=["smollm2-135m", "hash", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "sentencepiece":
        path = tmp_path_factory.mktemp("spm") / "model.gguf"
        _write_sentencepiece(path)
        return tokenizer_from_gguf(path)
    return load_tokenizer(resolve_model(request.param))


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_decoding_returns_the_encoded_text(any_tokenizer: Tokenizer, text: str) -> None:
    """Encoding keeps all bytes of the vocabulary (SmolLM2's lacks some bytes that valid text rarely has)."""
    assume(_writable(any_tokenizer, text))
    kept = any_tokenizer.encode(text, add_special=False)
    assert any_tokenizer.decode(kept, skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_pieces_concatenate_to_the_decoded_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For any tokens, including those that split a character. Returned pieces never change."""
    tokens = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_tokens - 1), max_size=30))
    skip = data.draw(st.booleans())
    stream = StreamDecoder(any_tokenizer, skip_special=skip)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == any_tokenizer.decode(tokens, skip_special=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_stream_never_shows_half_a_character(any_tokenizer: Tokenizer, text: str) -> None:
    """Every piece of valid text is valid, without new replacement characters."""
    assume(_writable(any_tokenizer, text))
    stream = StreamDecoder(any_tokenizer, skip_special=False)
    out = ""
    for token in any_tokenizer.encode(text, add_special=False):
        out += stream.push(token)
        assert text.startswith(out)
    assert out + stream.flush() == text


def _writable(tokenizer: Tokenizer, text: str) -> bool:
    single = _spellings(tokenizer)
    return all(bytes((byte,)) in single for byte in text.encode()) and "▁" not in text  # SentencePiece's own space


@functools.cache
def _spellings(tokenizer: Tokenizer) -> set[bytes]:
    return {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_tokens)}


def test_token_bytes_make_up_the_text(any_tokenizer: Tokenizer) -> None:
    """The bytes of tokens, as log probabilities report them, form the text. Other ids have no bytes."""
    tokens = any_tokenizer.encode("naïve 👋 text", add_special=False)
    joined = b"".join(any_tokenizer.token_bytes(token) for token in tokens).decode()
    assert joined.removeprefix(" ") == "naïve 👋 text"
    assert any_tokenizer.token_bytes(any_tokenizer.vocab_tokens + 7) == b""
    assert any_tokenizer.token_text(any_tokenizer.vocab_tokens + 7) == ""


def test_a_lone_surrogate_is_a_400(any_tokenizer: Tokenizer) -> None:
    """JSON can contain half of a surrogate pair. It is refused."""
    with pytest.raises(RequestError, match="surrogate"):
        any_tokenizer.encode("half \ud83d a smile")


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_no_token_stands_for_more_characters_than_the_bound(any_tokenizer: Tokenizer, text: str) -> None:
    assume(_writable(any_tokenizer, text))
    assert any_tokenizer.token_chars_max is not None
    assert len(text) <= any_tokenizer.token_chars_max * len(any_tokenizer.encode(text))


def test_the_longest_token_gives_the_bound(smollm: Tokenizer) -> None:
    """A line of 80 signs is one token of SmolLM2, and a line end with 80 spaces is another one."""
    assert len(smollm.encode("#" * 80)) == 1
    assert smollm.token_chars_max == 81


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Replace("b", "")])),
        ("pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_a_pipeline_that_drops_characters_has_no_bound(tmp_path: Path, part: str, step: object) -> None:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    pipeline.decoder = decoders.ByteLevel()
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.normalizer = normalizers.NFC()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path, None).token_chars_max == 4
    setattr(pipeline, part, step)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path, None).token_chars_max is None


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_an_added_token_that_takes_the_spaces_beside_it_has_no_bound(tmp_path: Path, side: str) -> None:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_tokens([tokenizers.AddedToken("<turn>", **{side: True})])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path, None)
    spaces = " " * 1000
    assert len(tokenizer.encode(f"{spaces}<turn>" if side == "lstrip" else f"<turn>{spaces}")) == 1
    assert tokenizer.token_chars_max is None


def test_other_threads_run_while_a_large_text_is_tokenized(smollm: Tokenizer) -> None:
    """A tokenizer that keeps Python's lock for half a second would stop every stream of the server."""
    text, found = "1234567890" * 30_000, list[int]()
    thread = threading.Thread(target=lambda: found.extend(smollm.encode(text, add_special=False)))
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert len(found) == len(text)
    assert turns > 40


def test_a_large_text_has_the_tokens_of_its_parts(any_tokenizer: Tokenizer) -> None:
    line = "A large text, of 7 words.\n"
    count = INLINE_CHARS_MAX // len(line) + 1
    one, two = (any_tokenizer.encode(line * times, add_special=True) for times in (1, 2))
    assert any_tokenizer.encode(line * count, add_special=True) == one + two[len(one) :] * (count - 1)
    with pytest.raises(RequestError, match="Unicode"):
        any_tokenizer.encode(line * count + "\ud800")


def test_special_tokens_are_known_and_skipped(smollm: Tokenizer) -> None:
    tokens = smollm.encode("<|im_start|>hi<|im_end|>")
    assert [smollm.is_special(token) for token in tokens] == [True, False, True]
    assert smollm.decode(tokens) == "hi"


# ---- SentencePiece in GGUF ---------------------------------------------------------------------------------------

PIECES = ["▁", *"abcdeé", "ab", "▁a", "abc", "de", "▁ab", "cd", "▁abc", "bc", "▁d", "▁de", "ee", "▁▁"]


def _write_sentencepiece(path: Path, *, space_prefix: bool = True) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(PIECES))])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(space_prefix)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    close_gguf(writer)


def _merge_best_first(text: str) -> list[str]:
    """Merge like SentencePiece: join the neighbours with the best score, the leftmost first."""
    scores = {piece: -rank for rank, piece in enumerate(PIECES)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=200, deadline=None)
@given(text=st.text("abcdeé ", min_size=1, max_size=20))
def test_scores_become_merges(text: str) -> None:
    """Merges made from scores split a text like SentencePiece's search."""
    scores = [-float(rank) for rank in range(len(PIECES))]
    backend = sentencepiece_backend(["<unk>", *PIECES], [0.0, *scores], add_space_prefix=True)
    assert backend.encode(text).tokens == _merge_best_first(text)


def test_sentencepiece_bytes_bos_and_leading_space(tmp_path: Path) -> None:
    """The space before a word is kept inside a text and after a prompt, and dropped at the start."""
    _write_sentencepiece(tmp_path / "model.gguf")
    tokenizer = tokenizer_from_gguf(tmp_path / "model.gguf")
    tokens = tokenizer.encode("abc 你</s>")
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert tokenizer.encode("abc", add_special=False) == tokenizer.encode("abc")[1:]
    assert tokenizer.decode(tokens) == "abc 你"
    stream = StreamDecoder(tokenizer, follows_text=True)
    assert stream.push(tokens[1]) == " abc"


# ---- tokenizer.json ----------------------------------------------------------------------------------------------


def _save_byte_level(folder: Path, *, adds_bos: bool, options: dict[str, object]) -> None:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    trained.train_from_iterator(["hello world", "hello there"], trainer)
    if adds_bos:
        trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.mark.parametrize(
    ("adds_bos", "options", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"bos_token": "<s>", "add_bos_token": True}, True),
        (True, {"bos_token": {"content": "<s>"}, "add_bos_token": False}, False),
        (True, {"bos_token": "<s>", "add_bos_token": True}, True),
    ],
)
def test_bos_follows_the_model_files(
    tmp_path: Path, adds_bos: bool, options: dict[str, object], expected: bool
) -> None:
    """tokenizer_config.json overrides the pipeline. Nothing is added to a rendered chat."""
    _save_byte_level(tmp_path, adds_bos=adds_bos, options=options)
    tokenizer = tokenizer_from_folder(tmp_path, 0)
    assert (tokenizer.encode("hello")[0] == 0) == expected
    assert tokenizer.encode("hello", add_special=False)[0] != 0
    assert tokenizer.decode(tokenizer.encode("hello wörld 👋")) == "hello wörld 👋"


def test_a_sentencepiece_tokenizer_json(tmp_path: Path) -> None:
    """A pipeline like Llama 2's: pieces with a space mark, and bytes as the fallback."""
    backend = sentencepiece_backend(
        ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<0xZZ>", *PIECES],
        [0.0] * 258 + [-1.0] * len(PIECES),
        add_space_prefix=True,
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path, None)
    for text in ("abc de", "  a b", "你好 abc"):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text == backend.decode(tokens)
    assert tokenizer.token_bytes(257) == b"<0xZZ>"  # looks like a byte, and is none


@pytest.mark.parametrize("text", ["abc de", " abc", "  de"])
def test_sentencepiece_without_a_leading_space(tmp_path: Path, text: str) -> None:
    """Some models add no space before a text, so a leading space belongs to the text and stays."""
    _write_sentencepiece(tmp_path / "model.gguf", space_prefix=False)
    tokenizer = tokenizer_from_gguf(tmp_path / "model.gguf")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(tokenizer.encode("你")[-1]) == "你".encode()[-1:]
    backend = sentencepiece_backend(["<unk>", *PIECES], [0.0] + [-1.0] * len(PIECES), add_space_prefix=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path, None)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no tokenizer.json"), ("{", "cannot read"), ("{}", "cannot read"), ("[1]", "cannot read")],
)
def test_a_missing_or_broken_file_names_the_remedy(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        tokenizer_from_folder(tmp_path, None)


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.normalizer = normalizers.Lowercase()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="byte-level BPE and SentencePiece"):
        tokenizer_from_folder(tmp_path, None)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_every_known_pre_tokenizer_keeps_the_text(tmp_path: Path, pre: str) -> None:
    """Llama 3 splits digits by three, Qwen and SmolLM one by one. No text is lost."""
    tokenizer = tokenizer_from_gguf(_write_byte_level(tmp_path / "model.gguf", pre))
    for text in ("hello 12345", "it's\n\n  so", "naïve 👋"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.encode("a")[0] == 0) == (pre == "llama-bpe")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has the pre-tokenizer 'tekken'"):
        tokenizer_from_gguf(_write_byte_level(tmp_path / "model.gguf", "tekken"))


def _write_byte_level(path: Path, pre: str) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", *alphabet, "he", "12", "123"])
    writer.add_token_types([3, *[1] * 256, 1, 1, 1])
    writer.add_token_merges(["h e", "1 2", "12 3"])
    writer.add_bos_token_id(0)
    close_gguf(writer)
    return path


@pytest.mark.parametrize("text", ["yes", 'a "naïve"\n\t{x: 1}', " two  spaces", "日本 😀", "a<|im_end|>b</s>"])
def test_every_vocabulary_spells_what_a_grammar_asks_for(any_tokenizer: Tokenizer, text: str) -> None:
    """Whatever tokens it has for it: pieces with spaces, parts of a character, bytes as a fallback."""
    vocab_tokens = any_tokenizer.vocab_tokens
    eos = next(token for token in range(vocab_tokens) if any_tokenizer.is_special(token))
    trie = token_trie(any_tokenizer, vocab_tokens=vocab_tokens, eos_token_ids=(eos,))
    masks, grammar = GrammarMasks(trie), Grammar(kind="choice", text=json.dumps([text]))
    tokens = [eos]
    while tokens[-1] != eos or len(tokens) == 1:
        (row,) = masks.answer(MaskJob(request_id=RequestId("r"), grammar=grammar, output=tokens[1:])).rows
        allowed = [token for token in range(vocab_tokens) if row[token // 8] >> token % 8 & 1]
        assert allowed
        tokens.append(max(allowed, key=lambda token: len(any_tokenizer.token_bytes(token)) * (token != eos)))
        assert tokens[-1] == eos or not any_tokenizer.is_special(tokens[-1])
    assert b"".join(any_tokenizer.token_bytes(token) for token in tokens[1:-1]).decode() == text
