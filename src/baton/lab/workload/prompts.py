"""Make a prompt for a request of a trace: the trace knows lengths and shared prefixes, not words.

Tokens are a hash of (seed, block id, position), so that equal leading ids give equal leading tokens, in every process
and on every machine. What a trace cannot give is the reuse of *decoded* tokens: the next turn of a logged chat holds
the logged answer, not the one that the server under test will write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.lab.workload.request import TraceRequest

VOCAB_TOKENS = 16_000
"""Below the vocabulary of every common model."""
_SPECIAL_TOKENS_MAX = 1_000
"""Low ids that are not drawn: control tokens stand there in many vocabularies."""
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
    """Deterministic prompts from a seed."""

    seed: int
    vocab_tokens: int = VOCAB_TOKENS
    """Ids are drawn below this, and not from the lowest 1,000 (of a small vocabulary: from its upper half)."""

    def token_ids(self, request: TraceRequest, index: int) -> list[int]:
        """Exactly `request.input_tokens` ids: its shared blocks first, then tokens that only request `index` has."""
        shared = self._shared(request)
        own = _stream(_keys([index], self.seed, _OWN_SALT), request.input_tokens - len(shared))
        low = min(_SPECIAL_TOKENS_MAX, self.vocab_tokens // 2)
        return (np.concatenate((shared, own)) % np.uint64(self.vocab_tokens - low) + np.uint64(low)).tolist()

    def text(self, request: TraceRequest, index: int) -> str:
        """As many common English words, one token each in most vocabularies. Equal ids give equal leading words."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(request, index))

    def _shared(self, request: TraceRequest) -> _U64:
        """Hashes for the tokens of the blocks that the trace names: [tokens]."""
        if not request.prefix_ids:
            return np.empty(0, np.uint64)
        keys = _keys(request.prefix_ids, self.seed, _PREFIX_SALT)
        return _stream(keys, request.prefix_block_tokens)[: request.input_tokens]


def _keys(ids: Sequence[int], seed: int, salt: int) -> _U64:
    """One key per id. The seed is scrambled first: neighbouring seeds shall not swap the keys of neighbouring ids."""
    start = int(_mix(np.array([(seed ^ salt) & _MASK], np.uint64))[0])
    return _mix(np.array([(value ^ start) & _MASK for value in ids], np.uint64))


def _stream(keys: _U64, count: int) -> _U64:
    """`count` hashes after each key, in one row: [keys * count]."""
    steps = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(keys[:, None] + steps[None, :]).reshape(-1)


def _mix(values: _U64) -> _U64:
    """Scramble 64-bit integers. Source: Steele et al., "Fast splittable pseudorandom number generators", 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
