"""`baton explain`: show every decision about one request, the policies' input, and the time of each phase."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cli.ask_server import URL, add_model, check_url, fetch, of_model
from baton.cli.key_flags import add_client_key, client_key
from baton.cli.logs import build_cluster, changed_policies, open_log
from baton.cli.output import STANDARD_OUTPUT, warn, write_json
from baton.cli.tables import wide_console
from baton.core.errors import ConfigError
from baton.core.types import WorkerId
from baton.decide.policy.weighing import deciding_term
from baton.lab.report.explain import Explanation, Found, explain, find_requests
from baton.lab.report.questions import Notes, Option, Question, Subject
from baton.lab.report.timeline import WorkerLine, read_timeline
from baton.serve.http.pages import LOG_FULL_HEADER

OPTIONS_MAX = 12
"""Maximum workers in a printed table, in the policy's order. `--json` has all of them."""
CHOICES_MAX = 8
"""Maximum choices (parameter `n`) of one HTTP request that are explained."""

WORDS: dict[Subject, str] = {
    "admit": "take it?",
    "prefill": "which worker computes the prompt?",
    "decode": "which worker decodes?",
    "move": "which worker continues it?",
}
INDENT = 17
"""Width of the column with the times, in characters."""
DECODING: tuple[Subject, ...] = ("decode", "move")

DESCRIPTION = """Explain one request of a running server or a log: its events, and for each decision the workers as the
policy saw them, with predicted times and ranks. Of a worker: why it changed its roles.

Of a worker: requests that it runs, and those bound to decode there; prompt tokens queued; tokens of context, and the
room for them; leading tokens of this prompt on its host; the age of its report; and predictions, in milliseconds.

The log is replayed, so the tables show exactly what the policies saw. A running server sends the part of its log
that is written (GET /cluster/log)."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = "Exit code: 0 explained, 2 no such log, server or request."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "request_id",
        metavar="REQUEST_ID",
        help="the X-Request-Id; of a simulation request-N, the Nth of its trace (from 0); or the name of a worker",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--url", default=URL, metavar="U", help="a running server, started with --log (default: %(default)s)"
    )
    source.add_argument(
        "--log", type=Path, metavar="FILE", help="a file that `baton serve --log` or `baton sim --log` wrote"
    )
    add_client_key(parser)
    add_model(parser)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    """Print explanations of the requests with the given id. Raises BatonError for an unknown log, server or request."""
    with _log(args) as log:
        header, decisions = open_log(log.path, log.name)
        warn(changed_policies(header))
        found = find_requests(decisions, args.request_id)
        worker = None if found.ids else read_timeline(open_log(log.path)[1]).workers.get(WorkerId(args.request_id))
        if worker is not None:
            return _show_roles(worker, args.json)
        if not found.ids:
            raise ConfigError(_unknown_request(args.request_id, found, log))
        stories: list[Explanation] = []
        for request_id in found.ids[:CHOICES_MAX]:
            header, decisions = open_log(log.path)
            notes = Notes(ranked=request_id)
            stories.append(explain(build_cluster(header, notes), notes, decisions, request_id))
    if args.json is not None:
        write_json(args.json, stories[0] if len(stories) == 1 else stories)
    if args.json != STANDARD_OUTPUT:
        console = wide_console()
        for story in stories:
            show(story, console)
    if len(found.ids) > len(stories):
        warn([f"{len(found.ids)} requests have this id; the first {len(stories)} are shown"])
    return 0


def _show_roles(line: WorkerLine, file: Path | None) -> int:
    """Print the roles of a worker over time, and why each began."""
    if file is not None:
        write_json(file, {"worker": line.worker, "roles": line.roles})
    if file != STANDARD_OUTPUT:
        table = Table(title=f"roles of {line.worker}", title_justify="left", box=None, padding=(0, 1))
        for name in ("from s", "role", "why"):
            table.add_column(name)
        for span in line.roles:
            table.add_row(f"{span.start_s - line.roles[0].start_s:,.1f}", span.role, span.reason or "-")
        wide_console().print(table)
    return 0


@dataclass(frozen=True, slots=True)
class _Log:
    """A decision log in a local file."""

    path: Path
    name: str
    """File or URL that the log came from, for error messages."""
    is_full: bool = False
    """The log reached its size limit, so that later requests are missing."""


@contextlib.contextmanager
def _log(args: argparse.Namespace) -> Iterator[_Log]:
    """Yield the log that `--log` names, or else a temporary copy of the server's log."""
    if args.log is not None:
        for_server = {"--api-key": args.api_key, "--api-key-file": args.api_key_file, "--model": args.model}
        if given := [flag for flag, value in for_server.items() if value is not None]:
            raise ConfigError(f"{given[0]} is for a server, and --log names a file: leave one of them out")
        yield _Log(args.log, str(args.log))
        return
    check_url(args.url)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder) / "decisions.log"
        headers = fetch(args.url, of_model("/cluster/log", args.model), client_key(args), path)
        yield _Log(path, args.url, headers.get(LOG_FULL_HEADER) == "yes")


def _unknown_request(request_id: str, found: Found, log: _Log) -> str:
    latest = f", the last of them {', '.join(found.latest)}" if found.latest else ""
    full = "; the log is full, and later requests are not in it (log_bytes_max, or its disk)" if log.is_full else ""
    return (
        f"{log.name}: no worker and no request {request_id!r} among its {found.requests}{latest}{full}; "
        "give the id that the server returned as X-Request-Id"
    )


def show(explanation: Explanation, console: Console) -> None:
    """Print the history of a request, with a table of the options for each decision of a policy."""
    facts = Table(title=f"request {explanation.request_id}", title_justify="left", show_header=False, box=None)
    for name, value in _facts(explanation):
        facts.add_row(name, value)
    console.print(facts)
    for moment in explanation.moments:
        _say(console, f"\n{moment.at_s * 1000:>12,.3f} ms  ", moment.what)
        for question in moment.questions:
            if question.subject != "admit" or question.refusal:
                console.print(_question_table(question))
            _say(console, " " * INDENT, f"{question.policy}: {_verdict(question)}")
    if explanation.differences:
        console.print(
            f"\nnote: a replay decides {explanation.differences} events differently from the log: the code or a "
            "policy has changed since, so the values shown may differ from those that the policies saw",
            markup=False,
        )


def _say(console: Console, head: str, text: str) -> None:
    """Print `head`, followed by `text`, whose lines are wrapped and indented by `INDENT` characters."""
    lines = textwrap.wrap(text, width=max(console.width - INDENT, INDENT), break_long_words=False) or [""]
    console.print(head + f"\n{' ' * INDENT}".join(lines), markup=False, highlight=False, soft_wrap=True)


def _facts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "outcome", f"{explanation.outcome or 'open'}{f': {explanation.reason}' if explanation.reason else ''}"
    answer = "" if explanation.output_tokens is None else f"{explanation.output_tokens:,} of "
    yield "prompt, output", f"{explanation.prompt_tokens:,}, {answer}{explanation.output_tokens_max:,} tokens"
    if explanation.slo is not None:
        slo = explanation.slo
        yield "SLO", f"TTFT {slo.ttft_s * 1000:,.4g} ms, TPOT {slo.tpot_s * 1000:,.4g} ms"
    if explanation.service_class:
        yield "class", explanation.service_class
    if explanation.tenant or explanation.priority:
        yield "tenant, priority", f"{explanation.tenant or '-'}, {explanation.priority}"
    yield "attempts", str(explanation.attempts)
    for name, seconds in (
        ("waited for a worker", explanation.queue_s),
        ("from there to the first token", explanation.prefill_s),
        ("TTFT", explanation.ttft_s),
        ("predicted TTFT", explanation.predicted_ttft_s),
        ("first token to the end" if explanation.prefill_s is not None else "on its worker", explanation.decode_s),
        ("TPOT", explanation.tpot_s),
        ("predicted TPOT", explanation.predicted_tpot_s),
        ("end to end", explanation.e2e_s),
    ):
        if seconds is not None:
            yield name, f"{seconds * 1000:,.3f} ms"


def _question_table(question: Question) -> Table:
    load = f"{question.live_requests} requests on workers, {question.waiting_requests} without one"
    expected_tokens = question.expected_output_tokens
    length = f"; its answer is expected to have {expected_tokens:,.0f} tokens" if expected_tokens else ""
    title = f"{WORDS[question.subject]} {load}{length}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    table.add_column("role")
    is_weighed = any(option.weighed is not None for option in question.options)
    decoding = ("step", "handoff/token", "TPOT") if is_weighed else ("step", "handoff", "both")
    names = decoding if question.subject in DECODING else ("queue", "prompt", "TTFT")
    table.add_column("rank", justify="right")
    for name in ("requests", "bound", "queued", "context", "room", "hit", "age ms", *(f"{name} ms" for name in names)):
        table.add_column(name, justify="right", no_wrap=True)
    ranked = sorted(question.options, key=lambda option: (option.rank or len(question.options), option.predicted_s))
    shown = ranked[:OPTIONS_MAX]
    chosen = question.option(question.chosen)
    if any(not option.is_offered for option in shown):
        table.caption = "+ not offered: another role, or a host to which its KV was not sent ahead"
        table.caption_justify = "left"
    for option in shown if chosen is None or chosen in shown else [*shown[:-1], chosen]:
        style = "bold" if option.worker == question.chosen else None
        table.add_row(*_cells(option, question), style=style)
    return table


def _cells(option: Option, question: Question) -> list[str]:
    mark = (">" if option.worker == question.chosen else " ") + (" " if option.is_offered else "+")
    decoding = question.subject in DECODING
    parts = (option.step_s, option.handoff_s) if decoding else (option.queue_s, option.prefill_s)
    return [
        mark + option.worker,
        option.role,
        "" if option.rank is None else str(option.rank),
        str(option.running_requests),
        str(option.bound_requests),
        f"{option.queued_tokens:,}",
        f"{option.context_tokens:,}",
        f"{option.kv_tokens_max:,}" if option.kv_tokens_max else "-",
        f"{option.hit_tokens:,}",
        "-" if option.report_age_s is None else f"{option.report_age_s * 1000:,.0f}",
        *("-" if part is None else f"{part * 1000:,.2f}" for part in parts),
        f"{option.predicted_s * 1000:,.2f}",
    ]


def _verdict(question: Question) -> str:
    """Describe in one sentence what the policy chose."""
    if question.refusal:
        return f"refused: {question.refusal}"
    best = question.best
    if question.subject == "admit":
        return (
            "taken"
            if best is None
            else f"taken; the earliest first token is predicted on {best.worker}, {best.predicted_s * 1000:,.2f} ms"
        )
    chosen = question.option(question.chosen)
    if chosen is None or best is None:
        return "no worker was chosen"
    if chosen.predicted_s == best.predicted_s:
        return f"{chosen.worker}, and no worker is predicted to be earlier"
    sooner = f"{best.worker} is predicted to be {(chosen.predicted_s - best.predicted_s) * 1000:,.3f} ms sooner"
    if chosen.weighed is None or best.weighed is None:
        own = _advantages(chosen, best)
        has = f"; {chosen.worker} has {' and '.join(own)}" if own else ""
        return f"{chosen.worker}, though {sooner}: {question.policy} does not choose by this time alone{has}"
    terms = deciding_term(chosen.weighed, best.weighed)
    if terms is None:
        return f"{chosen.worker}, though {sooner}"
    return f"{chosen.worker}: {sooner}, but it {terms[0]}; {chosen.worker} {terms[1]}"


def _advantages(chosen: Option, other: Option) -> list[str]:
    """Return the figures of the chosen worker that are better than those of the other one."""
    fewer = (
        ("requests", chosen.running_requests, other.running_requests),
        ("queued tokens", chosen.queued_tokens, other.queued_tokens),
        ("tokens of context", chosen.context_tokens, other.context_tokens),
    )
    found = [f"fewer {name} ({own:,}, not {theirs:,})" for name, own, theirs in fewer if own < theirs]
    if chosen.hit_tokens > other.hit_tokens:
        found.append(f"more cached tokens ({chosen.hit_tokens:,}, not {other.hit_tokens:,})")
    return found
