"""Read the flags of `baton bench` and report all their problems at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from baton.core.errors import ConfigError
from baton.core.files import output_problems
from baton.core.validation import Range
from baton.lab.bench.options import (
    BenchOptions,
    ClosedLoop,
    Endpoint,
    OpenLoop,
    Pacing,
    PromptFormat,
    Synthetic,
    TraceFile,
    TraceTimes,
)
from baton.lab.report.summary import SloTargets
from baton.lab.workload.arrivals import AllAtOnce, Arrivals, ConstantArrivals, GammaArrivals, PoissonArrivals
from baton.lab.workload.prompts import VOCAB_TOKENS
from baton.lab.workload.retime import rate_problems, read_arrivals

INPUT_TOKENS = 512
OUTPUT_TOKENS = 128
REQUESTS = 100
"""Number of requests of a synthetic run, unless --requests is given."""
ATTAINMENT_MIN = 0.9
TIMEOUT_S = 600.0
POSITIVE = Range(above=0.0)

Flags = Mapping[str, str | bool | None]
"""Values as typed on the command line; None: not given."""


@dataclass(slots=True)
class _Checks:
    """Reads flags one by one and collects their problems."""

    flags: Flags
    problems: list[str] = field(default_factory=list[str])

    def text(self, name: str) -> str | None:
        value = self.flags.get(name)
        return value if isinstance(value, str) else None

    def number(self, name: str, bounds: Range) -> float | None:
        """Return the number of a flag. None: not given, or out of bounds. The latter is added to the problems."""
        text = self.text(name)
        try:
            value = None if text is None else float(text)
        except ValueError:
            value = math.nan
        return self._within(name, bounds, value)

    def count(self, name: str, *, least: int) -> int | None:
        """Return the whole number of a flag. None: not given, or invalid. The latter is added to the problems."""
        text = self.text(name)
        value = None if text is None else int(text) if text.strip().isdecimal() else math.nan
        found = self._within(name, Range(least=least), value, "whole number")
        return None if found is None else int(found)

    def _within(self, name: str, bounds: Range, value: float | None, what: str = "number") -> float | None:
        if value is None or bounds.takes(value):
            return value
        self.problems.append(f"--{name} is {self.text(name)!r}; give a {what} {bounds}")
        return None

    def output(self, name: str) -> Path | None:
        text = self.text(name)
        path = None if text is None else Path(text)
        self.problems += output_problems({f"--{name}": path})
        return path

    def refuse_together(self, first: str, second: str, why: str) -> None:
        if self.text(first) is not None and self.text(second) is not None:
            self.problems.append(f"--{first} and --{second} cannot be given together: {why}")


def read_options(flags: Flags) -> BenchOptions:
    """Return the options of a run. Raises ConfigError with one problem per line."""
    checks = _Checks(flags)
    slo = SloTargets(ttft_s=checks.number("ttft-slo-s", POSITIVE), tpot_s=checks.number("tpot-slo-s", POSITIVE))
    workload, pacing = _workload(checks), _pacing(checks)
    requests = checks.count("requests", least=1)
    endpoint, prompt_format = _endpoint(checks)
    attainment_min = checks.number("attainment-min", Range(least=0.0, most=1.0))
    options = BenchOptions(
        url=_base_url(checks),
        workload=workload,
        pacing=pacing,
        requests=REQUESTS if requests is None and isinstance(workload, Synthetic) else requests,
        seed=checks.count("seed", least=0) or 0,
        warmup=_or(checks.count("warmup", least=0), 1),
        slo=slo,
        attainment_min=ATTAINMENT_MIN if attainment_min is None else attainment_min,
        model=checks.text("model"),
        api_key=checks.text("api-key"),
        endpoint=endpoint,
        prompt_format=prompt_format,
        context_tokens=checks.count("max-context", least=2),
        vocab_tokens=_or(checks.count("vocab-tokens", least=2), VOCAB_TOKENS),
        ignore_eos=flags.get("ignore-eos") is not False,
        timeout_s=checks.number("timeout-s", POSITIVE) or TIMEOUT_S,
        json=checks.output("json"),
        html=checks.output("html"),
    )
    if checks.problems:
        raise ConfigError("\n".join(checks.problems))
    return options


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _base_url(checks: _Checks) -> str:
    """Return the base URL of the API. A bare host gets `/v1`; a path (OpenVINO's `/v3`, a proxy's prefix) is kept."""
    url = checks.text("url")
    if url is None:
        checks.problems.append("--url is missing; give the server's address, as in --url http://127.0.0.1:8000")
        return ""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable:
        checks.problems.append(f"--url {url}: not a URL; write it like http://127.0.0.1:8000")
        return ""
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


def _workload(checks: _Checks) -> TraceFile | Synthetic:
    for length in ("input-tokens", "output-tokens"):
        checks.refuse_together("trace", length, "the trace has its own lengths")
    input_tokens = _or(checks.count("input-tokens", least=1), INPUT_TOKENS)
    output_tokens = _or(checks.count("output-tokens", least=1), OUTPUT_TOKENS)
    limit = checks.count("limit", least=1)
    rate_scale = checks.number("rate-scale", POSITIVE)
    trace = checks.text("trace")
    if trace is not None:
        if not Path(trace).is_file():
            checks.problems.append(f"--trace {trace}: no such file")
        return TraceFile(Path(trace), limit, 1.0 if rate_scale is None else rate_scale)
    for flag in ("limit", "rate-scale"):
        if checks.text(flag) is not None:
            checks.problems.append(f"--{flag} needs --trace")
    return Synthetic(input_tokens, output_tokens)


def _pacing(checks: _Checks) -> Pacing:
    """Return how the run is paced: at new times, by a number of clients, or at the trace's times.

    Without a flag, a synthetic run has one client.
    """
    checks.refuse_together("rate", "concurrency", "requests are sent either at a rate or when an answer has arrived")
    checks.refuse_together("rate", "rate-scale", "--rate-scale stretches the trace's own times")
    checks.refuse_together("concurrency", "rate-scale", "--rate-scale stretches the trace's own times")
    checks.refuse_together("arrivals", "concurrency", "a client sends its next request when its answer has arrived")
    checks.refuse_together("arrivals", "arrival-cv", "--arrivals gamma,cv=X does the same")
    rate_rps = checks.number("rate", POSITIVE)
    concurrency = checks.count("concurrency", least=1)
    arrivals = _arrivals(checks)
    if arrivals is not None or rate_rps is not None:
        return OpenLoop(rate_rps, PoissonArrivals(1.0) if arrivals is None else arrivals)
    if concurrency is not None:
        return ClosedLoop(concurrency)
    return ClosedLoop(1) if checks.text("trace") is None else TraceTimes()


def _arrivals(checks: _Checks) -> Arrivals | None:
    """Return the process of --arrivals or --arrival-cv at one request a second. None: not given, or invalid."""
    cv = checks.number("arrival-cv", Range(least=0.0))
    if cv is not None and checks.text("rate") is None:
        checks.problems.append("--arrival-cv needs --rate")
    text = checks.text("arrivals")
    if text is None:
        return None if cv is None or cv == 1 else GammaArrivals(1.0, cv) if cv else ConstantArrivals(1.0)
    try:
        arrivals = read_arrivals(text)
    except ConfigError as error:
        checks.problems += [f"--arrivals: {line}" for line in str(error).splitlines()]
        return None
    checks.problems += rate_problems(arrivals, rated=checks.text("rate") is not None)
    if checks.text("rate") is None and checks.text("trace") is None and not isinstance(arrivals, AllAtOnce):
        checks.problems.append("--arrivals needs --rate R, or a --trace with a mean rate to keep")
    return arrivals


def _endpoint(checks: _Checks) -> tuple[Endpoint, PromptFormat | None]:
    endpoint: Endpoint = "chat" if checks.text("endpoint") == "chat" else "completions"
    if checks.text("endpoint") not in (None, "completions", "chat"):
        checks.problems.append(f"--endpoint is {checks.text('endpoint')!r}; give completions or chat")
    match checks.text("prompt-format"):
        case None:
            return endpoint, "text" if endpoint == "chat" else None
        case "text":
            return endpoint, "text"
        case "ids" if endpoint == "chat":
            checks.problems.append("--prompt-format ids needs --endpoint completions: a chat message is text")
            return endpoint, "text"
        case "ids":
            return endpoint, "ids"
        case other:
            checks.problems.append(f"--prompt-format is {other!r}; give ids or text")
            return endpoint, None
