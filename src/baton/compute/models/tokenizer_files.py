"""Load a tokenizer from the files of a model: tokenizer.json, or the vocabulary in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import NFC

from baton.compute.models.gguf_file import GGUFFile, MetadataValue, open_gguf
from baton.compute.models.gguf_vocabulary import BOS_PRE_TOKENIZERS, byte_level_backend, sentencepiece_backend
from baton.compute.models.json_file import read_json
from baton.core.errors import BatonError, ModelError, RequestError

SPACE_MARK = "▁"
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
CONTROL, USER_DEFINED = 3, 4
"""GGUF types of tokens that are matched as a whole, before the text is split."""
INLINE_CHARS_MAX = 8192
"""Longer texts are tokenized as a batch of one: that releases Python's lock, which `encode` holds until its end."""
TOKEN_CHARS_MAX = 4096
"""Maximum characters of a SentencePiece token. The time to find its merges grows with the square of its length."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: printable Latin-1 is itself, the rest starts at U+0100.

    Source: GPT-2's encoder (Radford et al. 2019), which all later byte-level vocabularies use.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


KEPT_BY_NORMALIZERS = {"Prepend": 1, "Replace": 1, "NFC": 4}
"""Normalizers that drop no character, with the maximum number of characters that they join into one."""
KEPT_BY_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that drop no character, except `Split` with the behavior `Removed`."""
Spelling = Literal["bytes", "pieces", "pieces after a space"]
"""The meaning of token strings: byte-level BPE; SentencePiece; SentencePiece with a space before every text."""


class VocabularyTokenizer:
    """Implements `Tokenizer`: encodes with a `tokenizers` pipeline, and decodes by the bytes of each token."""

    def __init__(
        self,
        backend: Backend,
        spelling: Spelling,
        *,
        bos_token_id: int | None,
        add_bos: bool | None,
        joined_chars_max: int | None,
    ) -> None:
        """`add_bos`: whether texts start with `bos_token_id`. None: the pipeline decides.

        `joined_chars_max`: maximum characters that the pipeline joins into one before it finds tokens. None: unknown.
        """
        backend.no_padding()
        backend.no_truncation()
        self.vocab_tokens = backend.get_vocab_size(with_added_tokens=True)
        self.space_prefix = spelling == "pieces after a space"
        self._spelling = spelling
        self._backend = backend
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        added_tokens = backend.get_added_tokens_decoder()
        # A stripping token also consumes all spaces beside it, so it has no maximum of characters.
        takes_spaces = any(added.lstrip or added.rstrip for added in added_tokens.values())
        self.token_chars_max = None if joined_chars_max is None or takes_spaces else longest * joined_chars_max
        self._added = {token: added.content for token, added in added_tokens.items()}
        self._special = {token for token, added in added_tokens.items() if added.special}
        self._bos = bos_token_id
        self._add_bos = add_bos
        self._backend_adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        try:
            if len(text) > INLINE_CHARS_MAX:
                tokens: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
            else:
                tokens = self._backend.encode(text, add_special_tokens=add_special).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode (a lone surrogate); send whole characters") from error
        if not add_special or self._bos is None or self._add_bos in (None, self._backend_adds_bos):
            return tokens
        return [self._bos, *tokens] if self._add_bos else tokens[1:]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [token for token in tokens if not (skip_special and token in self._special)]
        data = b"".join([self.token_bytes(token) for token in kept])
        return (data.removeprefix(b" ") if self.space_prefix else data).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        if piece is None:
            return b""
        if self._spelling != "bytes":
            byte = BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE_MARK, " ").encode()
        if all(char in BYTE_OF_CHAR for char in piece):
            return bytes([BYTE_OF_CHAR[char] for char in piece])
        return piece.encode()


# ---- tokenizer.json ----------------------------------------------------------------------------------------------


TOKENIZER_BYTES_MAX = 64 << 20
"""Maximum size of tokenizer.json: twice that of the largest known one."""


class _Model(Struct, frozen=True):
    """The part of a pipeline's model that decides about unknown characters."""

    byte_fallback: bool | None = None


class _Pipeline(Struct):
    """The part of tokenizer.json that Baton itself reads."""

    decoder: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    model: _Model = _Model()


def tokenizer_from_folder(folder: Path, bos_token_id: int | None) -> VocabularyTokenizer:
    """Load tokenizer.json, and the rules for the BOS token from tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; make one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    pipeline = read_json(path, _Pipeline, bytes_max=TOKENIZER_BYTES_MAX)
    try:
        backend = Backend.from_file(str(path))
        backend.no_truncation()  # a prompt is never cut or filled up
        backend.no_padding()
        backend.encode("")
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"cannot read {path}: {error}; download it again, or upgrade `tokenizers`") from error
    options = _tokenizer_config(folder)
    bos = _bos_from_config(backend, options, bos_token_id)
    add_bos = options.get("add_bos_token")
    spelling = _spelling_of(path, pipeline.decoder)
    return VocabularyTokenizer(
        backend,
        spelling,
        bos_token_id=bos,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        joined_chars_max=_joined_chars_max(pipeline) if spelling == "bytes" or pipeline.model.byte_fallback else None,
    )


def _joined_chars_max(pipeline: _Pipeline) -> int | None:
    """Return the maximum number of characters that a pipeline joins into one. None: it may drop characters."""
    joined = 1
    for step in _steps(pipeline.normalizer, "normalizers"):
        if step.get("type") not in KEPT_BY_NORMALIZERS:
            return None
        if step["type"] == "Replace" and (step.get("pattern"), step.get("content")) != ({"String": " "}, SPACE_MARK):
            return None
        joined = max(joined, KEPT_BY_NORMALIZERS[step["type"]])
    for step in _steps(pipeline.pre_tokenizer, "pretokenizers"):
        if step.get("type") not in KEPT_BY_SPLITTERS or step.get("behavior") == "Removed":
            return None
    return joined


def _steps(part: object, key: str) -> list[dict[str, Any]]:
    """Return the steps of a pipeline's part: those of a sequence, or the part itself as the only step."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    steps = part.get(key)
    return [step for each in steps for step in _steps(each, key)] if isinstance(steps, list) else []


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path, dict[str, Any]) if path.is_file() else {}


def _bos_from_config(backend: Backend, options: dict[str, Any], default: int | None) -> int | None:
    token = options.get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return default if not isinstance(text, str) else backend.token_to_id(text)


def _spelling_of(path: Path, decoder: object) -> Spelling:
    """Return the meaning of token strings, derived from the decoder of the pipeline."""
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {str(part.get("type")): part for part in parts if isinstance(part, dict)}
    if "ByteLevel" in kinds:
        return "bytes"
    if "Metaspace" in kinds:
        return "pieces" if kinds["Metaspace"].get("prepend_scheme") == "never" else "pieces after a space"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return "pieces after a space" if "Strip" in kinds else "pieces"
    raise ModelError(
        f"{path} has the decoder {', '.join(sorted(kinds)) or 'none'}; Baton reads byte-level BPE and SentencePiece BPE"
    )


# ---- GGUF --------------------------------------------------------------------------------------------------------


def tokenizer_from_gguf(path: Path) -> VocabularyTokenizer:
    """Build the tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`)."""
    file = open_gguf(path)
    try:
        return _from_gguf(file)
    except (BatonError, MemoryError):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: its vocabulary cannot be read: {error}; convert the model again") from error


def _from_gguf(file: GGUFFile) -> VocabularyTokenizer:
    path, model = file.path, file.metadata.get("tokenizer.ggml.model")
    tokens = [str(token) for token in _array(file, "tokens")]
    longest = max(map(len, tokens), default=0)
    if not 0 < longest <= TOKEN_CHARS_MAX:
        raise ModelError(
            f"{path} has {len(tokens)} tokens, the longest of {longest} characters, and at most {TOKEN_CHARS_MAX}"
            " are possible; convert the model again"
        )
    if model == "gpt2":
        pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
        merges = [str(merge) for merge in _array(file, "merges")]
        backend = byte_level_backend(str(path), tokens, merges, pre)
        spelling: Spelling = "bytes"
        add_bos = pre in BOS_PRE_TOKENIZERS
    elif model == "llama":
        scores = [float(score) for score in _array(file, "scores") if isinstance(score, int | float)]
        prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        backend = sentencepiece_backend(tokens, scores, add_space_prefix=prefix)
        spelling = "pieces after a space" if prefix else "pieces"
        add_bos = True
    else:
        raise ModelError(
            f"{path} has the tokenizer model {str(model)[:80]};"
            " Baton reads gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    _add_whole_tokens(backend, tokens, _array(file, "token_type"))
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    return VocabularyTokenizer(
        backend,
        spelling,
        bos_token_id=bos if isinstance(bos, int) else None,
        add_bos=wanted is True,
        joined_chars_max=KEPT_BY_NORMALIZERS["NFC"] if isinstance(backend.normalizer, NFC) else 1,
    )


def _array(file: GGUFFile, key: str) -> list[MetadataValue]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelError(f"{file.path} has no tokenizer.ggml.{key}; convert the model again, with its tokenizer")
    return value


def _add_whole_tokens(backend: Backend, tokens: Sequence[str], kinds: Sequence[MetadataValue]) -> None:
    """Add control and user-defined tokens to the pipeline, so that it never splits them."""
    whole = [(text, kind) for text, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in whole])
