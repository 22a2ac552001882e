"""Text to tokens and back, whatever file the vocabulary came from. No torch, no transformers.

`decode` is defined by bytes: the bytes of all tokens one after the other, read as UTF-8, what is invalid replaced by
U+FFFD. So the pieces of a `StreamDecoder` put together are always what `decode` gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from baton.compute.hash_engine import BYTE_TOKENS_FROM, VOCAB_TOKENS
from baton.compute.models.card import ModelCard
from baton.compute.models.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from baton.core.errors import RequestError


class Tokenizer(Protocol):
    """What the server asks of a vocabulary."""

    vocab_tokens: int
    """Ids run from 0 to this, exclusive. A model's table may be padded beyond: those ids have no text."""
    space_prefix: bool
    """SentencePiece writes a word with the space before it, so the first one of a text has a space too many."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the tokens of a text, special tokens written in it included.

        `add_special`: also what the model wants around every text (its first token, mostly). False for a chat that
        its template has rendered. Raises RequestError if the text is not valid Unicode (a lone surrogate).
        """
        ...

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an id that the vocabulary does not have."""
        ...

    def token_text(self, token: int) -> str:
        """Return a token for the eye: its bytes as UTF-8, invalid ones replaced."""
        ...

    def is_special(self, token: int) -> bool:
        """Tell a control token (start, end of turn, ...) from text."""
        ...


def load_tokenizer(card: ModelCard) -> Tokenizer:
    """Load the vocabulary that belongs to a model. Raises ModelError if it is missing or of an unknown kind."""
    if card.format == "hash":
        return ByteTokenizer()
    if card.format == "gguf":
        return tokenizer_from_gguf(Path(card.path))
    return tokenizer_from_folder(Path(card.path), card.bos_token_id)


def check_unicode(text: str) -> None:
    """Raise RequestError (400) for text that cannot be written as UTF-8: JSON lets a client send half a character."""
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
    _specials = ("<eos>", "<bos>", "<unk>")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """One token per byte of UTF-8; nothing is added, so a prompt has as many tokens as bytes."""
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
    """Decode by way of a stream, so that there is one definition of a text."""
    stream = StreamDecoder(tokenizer, skip_special=skip_special)
    return "".join([stream.push(token) for token in tokens]) + stream.flush()


class StreamDecoder:
    """Turns one request's tokens into text as they come. Text that is out is never taken back.

    Bytes of a character that is not whole yet are held back, at most three of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        follows_text: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`follows_text`: the tokens go on from a prompt, so SentencePiece's space before the first word is meant.

        `shown`: special tokens that are text all the same, such as the mark of a tool call.
        """
        self._shown = shown
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.space_prefix and not follows_text

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly none."""
        if self._skip_special and self._tokenizer.is_special(token) and token not in self._shown:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what was held back, as a replacement character if it never became whole. Nothing comes after it."""
        return self._utf8.decode(b"", final=True)
