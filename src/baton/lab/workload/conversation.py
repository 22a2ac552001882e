"""Closed loop: the next turn of a conversation waits for the previous answer, and its prompt begins with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.lab.workload.request import TraceRequest

TURN_LOST = "the previous turn of its conversation failed, so its prompt lacks an answer"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that waits for the answer of the previous turn."""

    index: int
    """Index of the request in its trace."""
    request: TraceRequest
    known_tokens: int
    """Leading tokens of the prompt that repeat the previous prompt and answer, by the lengths in the trace."""

    def prompt_tokens(self, context_tokens: int) -> int:
        """Return the length of the prompt, if the conversation so far has `context_tokens` tokens."""
        own_tokens = self.request.input_tokens
        return context_tokens + own_tokens - min(self.known_tokens, own_tokens - 1)

    def prompt(self, own: Sequence[int], context: Sequence[int]) -> list[int]:
        """Return the conversation so far (`context`), then the new tokens of this turn.

        `own` is the whole prompt as a `PromptMaker` made it from the trace. The real answer may differ in length from
        the trace's, but the number of new tokens does not.
        """
        return [*context, *own[min(self.known_tokens, len(own) - 1) :]]


@dataclass(slots=True)
class Conversations:
    """The requests that open conversations, and the turns that follow. Without turns, every request is an opener."""

    openers: list[tuple[int, TraceRequest]] = field(default_factory=list[tuple[int, TraceRequest]])
    _turns: dict[int, Turn] = field(default_factory=dict[int, Turn])
    """Turns by the index of the request whose answer they wait for."""

    def follow(self, index: int, turn: Turn) -> None:
        """Let a turn wait for the answer to request `index`."""
        self._turns[index] = turn

    def is_followed(self, index: int) -> bool:
        """Return whether a turn waits for the answer to request `index`."""
        return index in self._turns

    def take_next(self, index: int) -> Turn | None:
        """Remove and return the turn after request `index`. It is due `request.think_s` after that answer."""
        return self._turns.pop(index, None)

    def take_rest(self, index: int) -> Iterator[Turn]:
        """Remove and yield all turns after request `index`, which got no answer: they never arrive."""
        while (turn := self.take_next(index)) is not None:
            yield turn
            index = turn.index


def link_conversations(requests: Sequence[TraceRequest]) -> Conversations:
    """Link the turns of every session. The requests of a session are in the order of their turns."""
    found = Conversations()
    latest: dict[tuple[str, str], int] = {}
    for index, request in enumerate(requests):
        session = (request.tenant, request.session)
        before = latest.get(session) if request.think_s is not None else None
        if before is None:
            found.openers.append((index, request))
        else:
            known_tokens = requests[before].input_tokens + requests[before].output_tokens
            found.follow(before, Turn(index, request, known_tokens))
        if request.session:
            latest[session] = index
    return found
