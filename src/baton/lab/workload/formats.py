"""The rows of public trace formats, and how each becomes a `TraceRequest`.

A format is known by the columns that it must have; where several fit, the one that names most columns wins.
A logged length of 0 (a cancelled call, an answer that only called a tool) is read as 1: it cost a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from msgspec import Struct, structs

from baton.core.types import Slo
from baton.lab.workload.request import Timing, TraceRequest
from baton.lab.workload.rows import Count, Fields, Length, Time, read_row

Reader = Callable[[Fields], TraceRequest]
"""Turns the fields of one row into a request. Raises ValueError with what is wrong with it."""

CHARS_PER_TOKEN = 4
"""Of English text, about. For traces that logged characters."""


class _Row(Protocol):
    def request(self) -> TraceRequest: ...


class MooncakeRow(Struct):
    """kvcache-ai/Mooncake, FAST25 traces. 512-token blocks, the last one may be partial."""

    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]

    def request(self) -> TraceRequest:
        return _request(
            at_s=self.timestamp / 1000,
            lengths=(self.input_length, self.output_length),
            prefix=(self.hash_ids, 512),
        )


class BailianRow(Struct):
    """Alibaba Qwen-Bailian. 16-token blocks; seconds; a chat names the chat that it goes on from."""

    chat_id: int | str
    parent_chat_id: int | str
    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]
    turn: int = 1

    def request(self, session: str) -> TraceRequest:
        return _request(
            at_s=self.timestamp,
            lengths=(self.input_length, self.output_length),
            prefix=(self.hash_ids, 16),
            session=(session, max(0, self.turn - 1)),
        )


class AzureRow(Struct):
    """Azure LLM inference traces 2023 and 2024: wall-clock times, lengths."""

    TIMESTAMP: str
    ContextTokens: Count
    GeneratedTokens: Count

    def request(self) -> TraceRequest:
        try:
            at = datetime.fromisoformat(self.TIMESTAMP)
        except ValueError as error:
            form = "2023-11-16 18:17:03.9799600"
            raise ValueError(f"TIMESTAMP is {self.TIMESTAMP!r}, but must be a time such as {form}") from error
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        return _request(at_s=at.timestamp(), lengths=(self.ContextTokens, self.GeneratedTokens))


class RtpLlmRow(Struct):
    """alibaba/rtp-llm online log of a disaggregated service. Full 1,024-token blocks."""

    ts: Time
    il: Count
    ol: Count
    bh: tuple[int, ...]
    priority: int

    def request(self) -> TraceRequest:
        return _request(at_s=self.ts / 1000, lengths=(self.il, self.ol), prefix=(self.bh, 1024), priority=self.priority)


class VtcRow(Struct):
    """The multi-tenant workload of the VTC fairness paper."""

    t_s: Time
    client: str
    prompt_len: Count
    output_len: Count

    def request(self) -> TraceRequest:
        return _request(at_s=self.t_s, lengths=(self.prompt_len, self.output_len), tenant=self.client)


class ShareGptRow(Struct):
    """ShareGPT requests of LLMServingSim. Full 16-token blocks."""

    t_ms: Time
    input_length: Count
    output_length: Count
    block_ids: tuple[int, ...]

    def request(self) -> TraceRequest:
        return _request(
            at_s=self.t_ms / 1000, lengths=(self.input_length, self.output_length), prefix=(self.block_ids, 16)
        )


class AgentRow(Struct):
    """Calls of LMCache's agent runs: characters, times since the session's first call, 2,048-character blocks."""

    session: int | str
    turn: Count
    t_ms: Time
    input_chars: Count
    output_chars: Count
    block_ids: tuple[int, ...]

    def request(self) -> TraceRequest:
        return _request(
            at_s=self.t_ms / 1000,
            lengths=(-(-self.input_chars // CHARS_PER_TOKEN), -(-self.output_chars // CHARS_PER_TOKEN)),
            prefix=(self.block_ids, 2048 // CHARS_PER_TOKEN),
            session=(str(self.session), self.turn),
        )


class VidurRow(Struct):
    """Lengths without times, as Vidur keeps them."""

    num_prefill_tokens: Count
    num_decode_tokens: Count

    def request(self) -> TraceRequest:
        return _request(at_s=0.0, lengths=(self.num_prefill_tokens, self.num_decode_tokens))


class BurstGptRow(Struct, rename={"at_s": "Timestamp", "input": "Request tokens", "output": "Response tokens"}):
    """BurstGPT: seconds, model, tokens. Newer files name the session."""

    at_s: Time
    input: Count
    output: Count

    def request(self) -> TraceRequest:
        return _request(at_s=self.at_s, lengths=(self.input, self.output))


class BurstGptSessionRow(BurstGptRow, rename={"session": "Session ID"}):
    session: str

    def request(self) -> TraceRequest:
        return _request(at_s=self.at_s, lengths=(self.input, self.output), session=(self.session, 0))


class BatonRow(Struct):
    """Our own: what a `TraceRequest` holds, as `baton replay --trace-out` writes it."""

    at_s: Time
    input_tokens: Length
    output_tokens: Length
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: Count = 0
    tenant: str = ""
    session: str = ""
    turn: Count = 0
    priority: int = 0
    slo: Slo | None = None
    think_s: Time | None = None

    def request(self) -> TraceRequest:
        request = _request(
            at_s=self.at_s,
            lengths=(self.input_tokens, self.output_tokens),
            prefix=(self.prefix_ids, self.prefix_block_tokens),
            session=(self.session, self.turn),
            tenant=self.tenant,
            priority=self.priority,
        )
        return structs.replace(request, slo=self.slo, think_s=self.think_s)


def _request(
    *,
    at_s: float,
    lengths: tuple[int, int],
    prefix: tuple[tuple[int, ...], int] = ((), 0),
    session: tuple[str, int] = ("", 0),
    tenant: str = "",
    priority: int = 0,
) -> TraceRequest:
    """Name the pairs (input, output tokens), (ids, block tokens), (session, turn) and refuse ids that do not fit."""
    ids, block_tokens = prefix
    input_tokens = max(1, lengths[0])
    blocks_max = -(-input_tokens // block_tokens) if block_tokens else 0
    if len(ids) > blocks_max:
        raise ValueError(
            f"{len(ids)} prefix blocks of {block_tokens} tokens, but {input_tokens} input tokens fill {blocks_max}; "
            f"name at most {blocks_max}"
        )
    return TraceRequest(
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=max(1, lengths[1]),
        prefix_ids=ids,
        prefix_block_tokens=block_tokens,
        tenant=tenant,
        session=session[0],
        turn=session[1],
        priority=priority,
    )


def _each(row: type[_Row]) -> Callable[[], Reader]:
    """A reader for rows that need to know nothing of the rows before them."""
    return lambda: lambda fields: read_row(fields, row).request()


def _chained() -> Reader:
    """A reader for Qwen-Bailian: a chat's session is that of the chat it goes on from."""
    sessions: dict[str, str] = {}

    def read(fields: Fields) -> TraceRequest:
        row: BailianRow = read_row(fields, BailianRow)
        parent, chat = str(row.parent_chat_id), str(row.chat_id)
        session = chat if parent == "-1" else sessions.get(parent, parent)
        sessions[chat] = session
        return row.request(session)

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """How to know a format, and how to read it."""

    name: str
    columns: frozenset[str]
    timing: Timing
    reader: Callable[[], Reader]
    """Makes a reader for one file."""


def _format(name: str, columns: str, reader: Callable[[], Reader], timing: Timing = "absolute") -> TraceFormat:
    return TraceFormat(name=name, columns=frozenset(columns.split(",")), timing=timing, reader=reader)


FORMATS: tuple[TraceFormat, ...] = (
    _format("mooncake", "timestamp,input_length,output_length,hash_ids", _each(MooncakeRow)),
    _format("bailian", "chat_id,parent_chat_id,timestamp,input_length,output_length,hash_ids", _chained),
    _format("azure", "TIMESTAMP,ContextTokens,GeneratedTokens", _each(AzureRow)),
    _format("rtpllm", "ts,il,ol,bh,priority", _each(RtpLlmRow)),
    _format("vtc", "t_s,client,prompt_len,output_len", _each(VtcRow)),
    _format("sharegpt", "t_ms,input_length,output_length,block_ids", _each(ShareGptRow)),
    _format("agent", "session,turn,t_ms,input_chars,output_chars,block_ids", _each(AgentRow), "session"),
    _format("vidur", "num_prefill_tokens,num_decode_tokens", _each(VidurRow), "none"),
    _format("burstgpt", "Timestamp,Request tokens,Response tokens", _each(BurstGptRow)),
    _format("burstgpt", "Timestamp,Request tokens,Response tokens,Session ID", _each(BurstGptSessionRow)),
    _format("baton", "at_s,input_tokens,output_tokens", _each(BatonRow)),
)

STATISTICS = {
    "arrivals": frozenset({"client", "rate_rps", "cv"}),
    "lengths": frozenset({"client", "in_mean", "out_mean"}),
}
"""Columns of ServeGen's per-client statistics, by what they are of: no requests, so not a trace."""


def find_format(columns: frozenset[str]) -> TraceFormat | None:
    """The format that names most of these columns, all of its own among them."""
    fitting = [known for known in FORMATS if known.columns <= columns]
    return max(fitting, key=lambda known: len(known.columns), default=None)


def nearest_format(columns: frozenset[str]) -> TraceFormat | None:
    """What a file of no known format was meant as: the format of which most is there, if that is half of it or more."""
    best = max(FORMATS, key=lambda known: len(known.columns & columns) / len(known.columns))
    return best if 2 * len(best.columns & columns) >= len(best.columns) else None
