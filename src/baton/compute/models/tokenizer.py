"""Convert text to tokens and back, for all file formats of vocabularies. No torch, no transformers.

`decode` concatenates the bytes of all tokens and reads them as UTF-8; invalid bytes become U+FFFD. The pieces of a
`StreamDecoder` concatenate to the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from baton.compute.hash_engine import BYTE_TOKENS_FROM, VOCAB_TOKENS
from baton.compute.models.card import ModelCard
from baton.compute.models.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from baton.core.errors import ModelError, RequestError


class Tokenizer(Protocol):
    """A vocabulary, as the server uses it."""

    vocab_tokens: int
    """Token ids are below this number. The model's table may have padding beyond it, with ids that have no text."""
    space_prefix: bool
    """Whether the vocabulary (SentencePiece) puts a space before the first word of a text."""
    token_chars_max: int | None
    """Maximum characters of a text that become one token. None: unknown, because characters may be dropped."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the tokens of a text. Special tokens that are written in the text are recognized.

        `add_special`: add the model's special tokens, such as BOS. False for a chat, where the template adds them.
        Raises RequestError if the text is not valid Unicode (a lone surrogate).
        """
        ...

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, or no bytes for an id outside of the vocabulary."""
        ...

    def token_text(self, token: int) -> str:
        """Return the bytes of a token as UTF-8 text, with invalid bytes replaced."""
        ...

    def is_special(self, token: int) -> bool:
        """Return whether a token is a control token (start, end of turn, ...) and not text."""
        ...


def load_tokenizer(card: ModelCard) -> Tokenizer:
    """Load the vocabulary of a model. Raises ModelError if it is missing or of an unknown kind."""
    if card.format == "hash":
        return ByteTokenizer()
    if card.format == "gguf":
        return tokenizer_from_gguf(Path(card.path))
    folder = Path(card.path)
    if card.format == "dummy" and not (folder / "tokenizer.json").is_file():
        return _byte_tokenizer(card)
    return tokenizer_from_folder(folder, card.bos_token_id)


def _byte_tokenizer(card: ModelCard) -> ByteTokenizer:
    """Return the hash model's vocabulary for a model without tokenizer.json. Its further tokens have no text."""
    if card.vocab_tokens < VOCAB_TOKENS:
        raise ModelError(
            f"{card.path} has no tokenizer.json, and its {card.vocab_tokens} tokens are too few for the bytes of a "
            f"text; set vocab_size in its config.json to at least {VOCAB_TOKENS}"
        )
    return ByteTokenizer()


def check_unicode(text: str) -> None:
    """Raise RequestError (400) for text that UTF-8 cannot represent: JSON allows half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}; send whole characters"
        ) from error


class ByteTokenizer:
    """The hash model's vocabulary: three special tokens, then one token per byte."""

    vocab_tokens = VOCAB_TOKENS
    space_prefix = False
    token_chars_max: int | None = 1
    _specials = ("<eos>", "<bos>", "<unk>")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return one token per byte of UTF-8. No special token is added."""
        check_unicode(text)
        return [BYTE_TOKENS_FROM + byte for byte in text.encode()]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return decode_tokens(self, tokens, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        if self.is_special(token):
            return self._specials[token].encode()
        return bytes((token - BYTE_TOKENS_FROM,)) if token < self.vocab_tokens else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return 0 <= token < BYTE_TOKENS_FROM


def decode_tokens(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special: bool) -> str:
    """Return the text of tokens, decoded by a `StreamDecoder`."""
    stream = StreamDecoder(tokenizer, skip_special=skip_special)
    return "".join([stream.push(token) for token in tokens]) + stream.flush()


class StreamDecoder:
    """Decodes the tokens of one request as they arrive. Returned text never changes.

    Bytes of an incomplete character, at most three, are held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        follows_text: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`follows_text`: the tokens continue a prompt, so a space before the first word is part of the text.

        `shown`: special tokens that are returned as text, such as the start of a tool call.
        """
        self._shown = shown
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.space_prefix and not follows_text

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly empty."""
        if self._skip_special and self._tokenizer.is_special(token) and token not in self._shown:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return the bytes held back, as a replacement character, and end the text."""
        return self._utf8.decode(b"", final=True)
