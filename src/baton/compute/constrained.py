"""An engine whose outputs match their requests' grammars, whatever engine computes them.

The masks of a step are made in a thread of their own while the forward pass runs: the tokens that they depend on are
known before it. llguidance and the kernels leave Python's lock alone meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLTokenizer
from msgspec.structs import replace

from baton.compute.models.card import ModelCard
from baton.compute.models.grammar import token_trie
from baton.compute.models.grammar_masks import GrammarMasks
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.step_engine import StepEngine
from baton.core.errors import RequestError
from baton.core.step import Slice, Step, StepResult

Made = list[bytes] | RequestError


@dataclass(frozen=True, slots=True)
class _PendingRows:
    """Implements `AllowedTokens`: one slice's part of what the thread makes."""

    made: Future[list[Made]]
    index: int

    def rows(self) -> Sequence[bytes]:
        made = self.made.result()[self.index]
        if isinstance(made, RequestError):
            raise made
        return made


class ConstrainedEngine:
    """A StepEngine around another one: tells it which tokens each slice may draw."""

    def __init__(self, inner: StepEngine, card: ModelCard) -> None:
        self.layout = inner.layout
        self.progress = inner.progress
        self._inner = inner
        self._card = card
        self._masks = GrammarMasks(self._load_trie)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def warm_up(self) -> None:
        """See `StepEngine.warm_up`."""
        self._inner.warm_up()

    def execute(self, step: Step) -> StepResult:
        """See `StepEngine.execute`."""
        asking = [index for index, part in enumerate(step.slices) if part.sample and part.sampling.grammar is not None]
        return self._inner.execute(self._constrained(step, asking) if asking else step)

    def _constrained(self, step: Step, asking: Sequence[int]) -> Step:
        slices = list(step.slices)
        made = self._thread.submit(self._make, [slices[index] for index in asking])
        for rank, index in enumerate(asking):
            slices[index] = replace(slices[index], allowed=_PendingRows(made, rank))
        return Step(tuple(slices))

    def _make(self, parts: Sequence[Slice]) -> list[Made]:
        return [self._rows(part) for part in parts]

    def _rows(self, part: Slice) -> Made:
        try:
            return self._masks.rows(part)
        except RequestError as error:
            return error

    def _load_trie(self) -> LLTokenizer:
        card = self._card
        return token_trie(load_tokenizer(card), vocab_tokens=card.vocab_tokens, eos_token_ids=card.eos_token_ids)
