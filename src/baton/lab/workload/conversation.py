"""Closed loop: the next turn of a conversation waits for the answer before it, and begins with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.lab.workload.request import TraceRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that waited for an answer."""

    index: int
    """Of the request in its trace."""
    request: TraceRequest
    known_tokens: int
    """Leading tokens of its prompt that are the prompt and the answer before it, as long as the trace meant them."""

    def prompt_tokens(self, said_tokens: int) -> int:
        """How long the prompt will be after `said_tokens` of talk."""
        own_tokens = self.request.input_tokens
        return said_tokens + own_tokens - min(self.known_tokens, own_tokens - 1)

    def prompt(self, own: Sequence[int], said: Sequence[int]) -> list[int]:
        """Put what was really said before what is new. `own` is the whole prompt that a `PromptMaker` made.

        An answer may have become shorter or longer than the trace meant it; what is new stays as long as it is.
        """
        return [*said, *own[min(self.known_tokens, len(own) - 1) :]]


@dataclass(slots=True)
class Conversations:
    """Who opens, and who follows whom. A trace without closed loops has openers only."""

    openers: list[tuple[int, TraceRequest]] = field(default_factory=list[tuple[int, TraceRequest]])
    _turns: dict[int, Turn] = field(default_factory=dict[int, Turn])
    """By the index of the request that comes before."""

    def follow(self, index: int, turn: Turn) -> None:
        """Let a turn wait for the answer to request `index`."""
        self._turns[index] = turn

    def is_followed(self, index: int) -> bool:
        """Whether somebody waits for the answer to request `index`."""
        return index in self._turns

    def following(self, index: int) -> Turn | None:
        """Take the turn that follows request `index`: it is due `request.think_s` after that one's answer."""
        return self._turns.pop(index, None)

    def abandoned(self, index: int) -> Iterator[Turn]:
        """Take all turns that follow request `index`, which got no answer: they never come."""
        while (turn := self.following(index)) is not None:
            yield turn
            index = turn.index


def link_conversations(requests: Sequence[TraceRequest]) -> Conversations:
    """Link the turns of every session. Requests stand in order; turns of one session in the order of their turns."""
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
