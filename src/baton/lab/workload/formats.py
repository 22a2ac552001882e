"""The public trace formats, and the conversion of their rows to a `TraceRequest`.

A file has a format if it has all columns of that format. If several formats fit, the one with most columns wins. A
logged length of 0 (a cancelled call, an answer that only called a tool) is read as 1, because it cost a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import cast

import msgspec
from msgspec import Struct, structs

from baton.lab.workload.request import Timing, TraceRequest
from baton.lab.workload.rows import Count, Fields, Time, read_row

Reader = Callable[[Fields], TraceRequest]
"""Convert the fields of one row into a request. Raises ValueError that says which field is wrong."""

CHARS_PER_TOKEN = 4
"""Average of English text. Used for traces that log characters instead of tokens."""


class _Row(Struct, kw_only=True, rename=lambda name: f"<{name}>"):
    """All fields that a trace format may have.

    `TraceFormat.reader` renames the fields of its format to their columns, and requires them. The others keep a name in
    angle brackets, which no column of a file has, so they keep their defaults.
    """

    at: Time = 0.0
    moment: str = ""
    """Wall-clock time, where a format has that instead of `at`."""
    input: Count = 0
    output: Count = 0
    ids: tuple[int, ...] = ()
    """Names of the prompt's leading blocks; the last block may be partial."""
    session: int | str = ""
    chat: int | str = ""
    parent: int | str = ""
    """The chat that this one continues; -1 for none."""
    turn: Count = 0
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """The columns of a format and their units."""

    name: str
    columns: Mapping[str, str]
    """Every required column, and the field of `_Row` that it fills."""
    timing: Timing = "absolute"
    ticks_per_s: int = 1
    block_tokens: int = 0
    """Tokens of a prefix block."""
    chars_per_token: int = 1
    turn_column: str = ""
    """Optional column that numbers the turns of a session from 1."""

    def reader(self) -> Reader:
        """Return a reader for one file."""
        if self.name == "baton":
            return _read_baton
        named = {ours: column for column, ours in self.columns.items()}
        fields: list[tuple[str, type] | tuple[str, type, int]] = [
            (each.name, each.type) for each in structs.fields(_Row) if each.name in named
        ]
        if self.turn_column:
            named["turn"] = self.turn_column
            fields.append(("turn", int, 1))
        row = msgspec.defstruct(self.name, fields, bases=(_Row,), rename=named, kw_only=True)
        return partial(self._read, cast("type[_Row]", row), {})

    def _read(self, kind: type[_Row], sessions: dict[str, str], fields: Fields) -> TraceRequest:
        """Return the request of one row.

        `sessions`: the session of every chat read so far. A chat continues the session of its parent.
        """
        row = read_row(fields, kind)
        session = str(row.session)
        if row.chat != "":
            parent, chat = str(row.parent), str(row.chat)
            session = sessions[chat] = chat if parent == "-1" else sessions.get(parent, parent)
        return _checked(
            TraceRequest(
                at_s=_unix_s(row.moment) if row.moment else row.at / self.ticks_per_s,
                input_tokens=max(1, -(-row.input // self.chars_per_token)),
                output_tokens=max(1, -(-row.output // self.chars_per_token)),
                prefix_ids=row.ids,
                prefix_block_tokens=self.block_tokens,
                tenant=row.tenant,
                session=session,
                turn=max(0, row.turn - 1) if self.turn_column else row.turn,
                priority=row.priority,
            )
        )


def _read_baton(fields: Fields) -> TraceRequest:
    return _checked(read_row(fields, TraceRequest))


def _unix_s(moment: str) -> float:
    try:
        at = datetime.fromisoformat(moment)
    except ValueError as error:
        form = "2023-11-16 18:17:03.9799600"
        raise ValueError(f"TIMESTAMP is {moment!r}, but must be a time such as {form}") from error
    return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).timestamp()


def _checked(request: TraceRequest) -> TraceRequest:
    """Return the request. Raises ValueError if it names more prefix blocks than its prompt has."""
    tokens, block_tokens, named = request.input_tokens, request.prefix_block_tokens, len(request.prefix_ids)
    blocks_max = -(-tokens // block_tokens) if block_tokens else 0
    if named > blocks_max:
        raise ValueError(
            f"{named} prefix blocks of {block_tokens} tokens, but {tokens} input tokens fill {blocks_max}; "
            f"name at most {blocks_max}"
        )
    return request


_MOONCAKE = {"timestamp": "at", "input_length": "input", "output_length": "output", "hash_ids": "ids"}
_BURSTGPT = {"Timestamp": "at", "Request tokens": "input", "Response tokens": "output"}
FORMATS: tuple[TraceFormat, ...] = (
    # kvcache-ai/Mooncake, FAST25 traces
    TraceFormat(name="mooncake", columns=_MOONCAKE, ticks_per_s=1000, block_tokens=512),
    # Alibaba Qwen-Bailian
    TraceFormat(
        name="bailian",
        columns={"chat_id": "chat", "parent_chat_id": "parent", **_MOONCAKE},
        block_tokens=16,
        turn_column="turn",
    ),
    # Azure LLM inference traces 2023 and 2024
    TraceFormat(name="azure", columns={"TIMESTAMP": "moment", "ContextTokens": "input", "GeneratedTokens": "output"}),
    # alibaba/rtp-llm: online log of a disaggregated service
    TraceFormat(
        name="rtpllm",
        columns={"ts": "at", "il": "input", "ol": "output", "bh": "ids", "priority": "priority"},
        ticks_per_s=1000,
        block_tokens=1024,
    ),
    # the multi-tenant workload of the VTC fairness paper
    TraceFormat(name="vtc", columns={"t_s": "at", "client": "tenant", "prompt_len": "input", "output_len": "output"}),
    # ShareGPT requests of LLMServingSim
    TraceFormat(
        name="sharegpt",
        columns={"t_ms": "at", "input_length": "input", "output_length": "output", "block_ids": "ids"},
        ticks_per_s=1000,
        block_tokens=16,
    ),
    # calls of LMCache's agent runs: times count from the session's first call, blocks are 2,048 characters
    TraceFormat(
        name="agent",
        columns={
            "session": "session",
            "turn": "turn",
            "t_ms": "at",
            "input_chars": "input",
            "output_chars": "output",
            "block_ids": "ids",
        },
        timing="session",
        ticks_per_s=1000,
        block_tokens=2048 // CHARS_PER_TOKEN,
        chars_per_token=CHARS_PER_TOKEN,
    ),
    # Vidur: lengths without times
    TraceFormat(name="vidur", columns={"num_prefill_tokens": "input", "num_decode_tokens": "output"}, timing="none"),
    # BurstGPT; newer files name the session
    TraceFormat(name="burstgpt", columns=_BURSTGPT),
    TraceFormat(name="burstgpt", columns={**_BURSTGPT, "Session ID": "session"}),
    TraceFormat(name="baton", columns={"at_s": "at", "input_tokens": "input", "output_tokens": "output"}),
)

STATISTICS = {
    "arrivals": frozenset({"client", "rate_rps", "cv"}),
    "lengths": frozenset({"client", "in_mean", "out_mean"}),
}
"""Columns of ServeGen's statistics of each client. Such files describe clients, not requests: they are no traces."""


def find_format(columns: frozenset[str]) -> TraceFormat | None:
    """Return the format that has all its columns in the file; of several, the one with most columns."""
    fitting = [known for known in FORMATS if known.columns.keys() <= columns]
    return max(fitting, key=lambda known: len(known.columns), default=None)


def nearest_format(columns: frozenset[str]) -> TraceFormat | None:
    """Return the format that a file with these columns most likely has, to name it in an error text.

    That is the format with the largest share of its columns present. None: no format has half of its columns present.
    """
    best = max(FORMATS, key=lambda known: len(known.columns.keys() & columns) / len(known.columns))
    return best if 2 * len(best.columns.keys() & columns) >= len(best.columns) else None
