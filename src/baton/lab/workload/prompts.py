"""Make a prompt for each request of a trace, which has lengths and shared prefixes but no words.

Tokens are a hash of (seed, block id, position). Equal leading ids give equal leading tokens on every machine. Prompts
of a trace cannot reuse *decoded* tokens: the next turn of a logged chat holds the logged answer, not the answer of the
server under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.lab.workload.request import TraceRequest

VOCAB_TOKENS = 16_000
"""Default bound of token ids: below the vocabulary size of every common model."""
_SPECIAL_TOKENS_MAX = 1_000
"""Ids below this are not drawn: many vocabularies have control tokens there."""
_MASK = (1 << 64) - 1
_PREFIX_SALT = 0x6A09E667F3BCC908
_OWN_SALT = 0xBB67AE8584CAA73B
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face level office
door health person art war history party result change morning reason research girl guy moment air teacher force
green old new good great small large young long little own other big high different early important public bad
same able
""".split()  # noqa: SIM905 (seven lines instead of a hundred)

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """Makes the same prompts for the same seed."""

    seed: int
    vocab_tokens: int = VOCAB_TOKENS
    """Size of the vocabulary. Ids are drawn from 1,000 on, or from the upper half of a vocabulary below 2,000."""

    def token_ids(self, request: TraceRequest, index: int) -> list[int]:
        """Return `request.input_tokens` ids: its shared blocks, then tokens that only request `index` has."""
        shared = _shared_ids(self, request.prefix_ids, request.prefix_block_tokens)[: request.input_tokens]
        own = _stream(_keys([index], self.seed, _OWN_SALT), request.input_tokens - len(shared))
        return shared + self.ids(own)

    def ids(self, hashes: _U64) -> list[int]:
        low = min(_SPECIAL_TOKENS_MAX, self.vocab_tokens // 2)
        return (hashes % np.uint64(self.vocab_tokens - low) + np.uint64(low)).tolist()

    def text(self, request: TraceRequest, index: int) -> str:
        """Return one common English word per token id: most vocabularies have each word as one token."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(request, index))


@lru_cache(maxsize=4)  # all simulated prompts of a plan share a prefix, which takes longer than the rest of the prompt
def _shared_ids(maker: PromptMaker, prefix_ids: tuple[int, ...], block_tokens: int) -> list[int]:
    """Return the ids of the tokens of prefix blocks. The list must not be changed."""
    return maker.ids(_stream(_keys(prefix_ids, maker.seed, _PREFIX_SALT), block_tokens))


def _keys(ids: Sequence[int], seed: int, salt: int) -> _U64:
    """Return one key per id. The seed is hashed first: otherwise seeds n and n+1 would swap keys of adjacent ids."""
    start = int(_mix(np.array([(seed ^ salt) & _MASK], np.uint64))[0])
    return _mix(np.array([(value ^ start) & _MASK for value in ids], np.uint64))


def _stream(keys: _U64, count: int) -> _U64:
    """Return `count` hashes for each key, in one row: [keys * count]."""
    steps = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(keys[:, None] + steps[None, :]).reshape(-1)


def _mix(values: _U64) -> _U64:
    """Hash 64-bit integers. Source: Steele et al., "Fast splittable pseudorandom number generators", 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
