"""Constrained decoding: make the outputs of any engine match the grammars of their requests.

A separate thread computes the token masks of a step during its forward pass, because they only depend on earlier
tokens. llguidance and the kernels release Python's global interpreter lock (GIL) meanwhile.
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

Masks = list[bytes] | RequestError
"""The masks of one slice, one per drafted position, or the error that its request fails with."""


@dataclass(frozen=True, slots=True)
class _PendingRows:
    """Implements `AllowedTokens`: the masks of one slice, which the thread computes."""

    masks: Future[list[Masks]]
    index: int

    def rows(self) -> Sequence[bytes]:
        masks = self.masks.result()[self.index]
        if isinstance(masks, RequestError):
            raise masks
        return masks


class ConstrainedEngine:
    """Implements `StepEngine` around another engine, and limits the tokens that it may sample for each slice."""

    def __init__(self, inner: StepEngine, card: ModelCard) -> None:
        self.layout = inner.layout
        self.progress = inner.progress
        self._inner = inner
        self._card = card
        self._masks = GrammarMasks(self._load_trie)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def warm_up(self) -> None:
        self._inner.warm_up()

    def execute(self, step: Step) -> StepResult:
        constrained = [
            index for index, part in enumerate(step.slices) if part.sample and part.sampling.grammar is not None
        ]
        return self._inner.execute(self._with_masks(step, constrained) if constrained else step)

    def _with_masks(self, step: Step, constrained: Sequence[int]) -> Step:
        slices = list(step.slices)
        masks = self._thread.submit(self._compute_masks, [slices[index] for index in constrained])
        for order, index in enumerate(constrained):
            slices[index] = replace(slices[index], allowed=_PendingRows(masks, order))
        return Step(tuple(slices))

    def _compute_masks(self, parts: Sequence[Slice]) -> list[Masks]:
        return [self._masks_of(part) for part in parts]

    def _masks_of(self, part: Slice) -> Masks:
        try:
            return self._masks.rows(part)
        except RequestError as error:
            return error

    def _load_trie(self) -> LLTokenizer:
        card = self._card
        return token_trie(load_tokenizer(card), vocab_tokens=card.vocab_tokens, eos_token_ids=card.eos_token_ids)
