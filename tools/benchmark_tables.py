"""Tables of docs/benchmarks.md about serving, the engine and transfers. Each returns lines of Markdown."""

from __future__ import annotations

import itertools
import re
from typing import Any

from benchmark_results import is_stale, load, ms, percent, section, signed

STEPS = ("decode_1", "decode_8", "decode_32", "prefill_512", "prefill_2048")
STEP_NAMES = ("decode, batch 1", "batch 8", "batch 32", "prefill 512", "prefill 2,048")
ENGINE_RESULTS = {"engines": ("bfloat16", "int8", "int4")}
"""The formats of weights that a result is shown for."""
ENGINE_CONTEXTS = ("engines-64", "engines-2000")
ENGINE_ROWS = {"baton against the best peer": "against best peer", "baton, share of the limit": "share of limit"}
"""Short names of rows below those of the engines."""


LOADS = ("concurrency 1", "concurrency 8", "concurrency 32")
SERVING_HEADS = ["At concurrency 1 / 8 / 32", "Output tokens/s", "TTFT p50, ms", "ITL p99, ms"]


def serving_source() -> str:
    """Return the result that the serving table is made of: the one beside vLLM where it was measured."""
    return "serving-peers" if load("serving-peers") else "serving"


def serving_rows() -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the serving table: one row per server."""
    result = load(serving_source())
    if serving_source() == "serving":
        heads = [*SERVING_HEADS[:3], "TPOT p99, ms"]
        return heads, [_serving_row(result, kind) for kind in ("1 prefill + 1 decode", "1 mixed")]
    keys = (("output_throughput", ".0f"), ("median_ttft_ms", ",.0f"), ("p99_itl_ms", ",.0f"))
    rows = [
        [
            server,
            *(" / ".join(f"{result[server][kind][key]:{form}}" for kind in LOADS) for key, form in keys),
            f"{result[server]['goodput']['request_goodput']:.2f}",
        ]
        for server in ("baton 1P1D", "baton mixed", "vllm serve")
    ]
    return [*SERVING_HEADS, "Goodput, requests/s"], rows


def _serving_row(result: dict[str, Any], kind: str) -> list[str]:
    loads = [result[f"load, {kind}"][name] for name in LOADS]
    cells = (
        [f"{row['output_tokens_per_s']:.0f}" for row in loads],
        [ms(row["ttft_s"]["p50"]) for row in loads],
        [ms(row["tpot_s"]["p99"]) for row in loads],
    )
    return [kind, *(" / ".join(row) for row in cells)]


def serving_note() -> str:
    """Return what was measured, in a sentence."""
    if serving_source() == "serving":
        return f"{load('serving')['what']}."
    result = load("serving-peers")
    slo = result["slo"]
    return (
        f"SmolLM2-135M-Instruct in {result['dtype']} through HTTP, load of `vllm bench serve`: 256 tokens in, 64 out. "
        f"Goodput: TTFT <= {slo['ttft_ms'] / 1000:g} s and TPOT <= {slo['tpot_ms']} ms, 400 +-50 % tokens in, "
        f"80 out, bursty, {slo['offered_rps']:g} requests/s offered."
    )


def serving() -> list[str]:
    heads, rows = serving_rows()
    return section("Latency, throughput and goodput over load", serving_source(), heads, rows, serving_note())


def edge() -> list[str]:
    result = load("edge-overhead")
    rows = [
        [
            name,
            *(f"{figures[kind]['requests_per_s']['median']:,.0f}" for kind in ("with_checks", "without_checks")),
            signed(-figures["throughput_lost_ratio"]["median"]),
            f"{figures['cpu_added_s']['median'] * 1e6:+.0f}",
            f"{figures['ttft_added_s']['median'] * 1e3:+.2f}",
        ]
        for name, figures in result.items()
        if isinstance(figures, dict) and "ttft_added_s" in figures
    ]
    heads = ["Response", "Requests/s with checks", "without", "throughput", "CPU per request, us", "TTFT, ms"]
    note = f"Hash engine, {result['concurrency']} clients; medians of paired rounds."
    return section("Checks of the HTTP edge", "edge-overhead", heads, rows, note)


def overhead() -> list[str]:
    result = load("serving")
    figures = result["overhead, 1 prefill + 1 decode"]
    rows = [
        ["handoff on one host", f"{ms(figures['handoff_s']['median'])} ms, {figures['handoff_bytes']:.0f} bytes"],
        [
            "added to TTFT by Python, HTTP and the hop",
            f"{ms(figures['added_to_ttft_over_its_own_step_s']['median'])} ms",
        ],
        ["added to TPOT", percent(figures["added_to_tpot_over_its_own_steps_ratio"]["median"], 1)],
    ]
    for kind in ("1 prefill + 1 decode", "1 mixed"):
        speeds = result[f"prefill, {kind}"]
        found = " / ".join(f"{figures['tokens_per_s']:.0f}" for figures in speeds.values())
        rows.append([f"prefill of {' / '.join(speeds)} tokens, {kind}", f"{found} tokens/s"])
    return section("Overhead of the server", "serving", ["Figure", "Median"], rows, result["what"] + ".")


def start() -> list[str]:
    rows = []
    for name, figures in load("start")["rows"].items():
        if name in ("baton serve --port 70000", "baton srve"):
            continue
        now = figures["this"]
        cpu = now.get("all cpu_s", now.get("cpu_s"))["median"]
        memory = f"{now['all pss_bytes']['median'] / 1e6:.0f}" if "all pss_bytes" in now else ""
        rows.append([name, f"{cpu:.2f}", memory])
    return section("Start", "start", ["Command or topology", "CPU s", "Memory without arena, MB"], rows)


def steps(names: str, title: str, note: str = "", *, clock: str = "median_s") -> list[str]:
    """Return a table of the steps of these results. `clock`: `median_s`, or `cpu_min_s` for a run on a busy machine."""
    rows = [
        [what, *(f"{ms(row[clock])}/{percent(row['cpu_share'])}" for row in (figures["steps"][s] for s in STEPS))]
        for name in names.split()
        for what, figures in load(name)["figures"].items()
    ]
    unit = "ms" if clock == "median_s" else "CPU ms"
    return section(title, names, [f"{unit} per step/share of the machine's limit", *STEP_NAMES], rows, note)


def native_grid() -> list[str]:
    """Return the steps of all batch sizes: time, share of the limit and what limits it, speed over the old version."""
    result = load("native-grid")
    against = next(name for name in result["rows"][0]["seconds"] if name != "this tree")
    decodes = [row for row in result["rows"] if not row["case"].startswith("prompt")]
    batches = list(dict.fromkeys(row["case"].split(" x ")[0] for row in decodes))
    cells: dict[str, list[str]] = {}
    for row in decodes:
        time_s, old_s = row["seconds"]["this tree"], row["seconds"][against]
        limit = f"{percent(row['limit_s'] / time_s)}{row['limited_by'][0]}"
        key = f"{row['weights']}/{row['case'].split(' x ')[1]}"
        cells.setdefault(key, []).append(f"{ms(time_s)}/{limit}/{old_s / time_s:.2f}")
    heads = [f"Weights/context; ms/share of limit/speed over {against}, by batch", *batches]
    note = (
        f"{result['environment']['cpu']}, {result['threads']} threads. m: limited by memory"
        f" ({result['limits']['bytes_per_s'] / 1e9:.0f} GB/s); p: by products"
        f" ({result['limits']['bfloat16_flops'] / 1e9:.0f} GFLOP/s in bfloat16; quantized: more)."
    )
    return section("Batch sizes", "native-grid", heads, [[key, *of] for key, of in cells.items()], note)


def engines() -> list[str]:
    """Return one table from those that benchmarks/engines.py made itself."""
    found: list[list[str]] = []
    cases: list[str] = []
    for name, weights in ENGINE_RESULTS.items():
        lines = load(name)["table"]
        for kind in weights:
            start = next(number for number, line in enumerate(lines) if line.startswith(f"Weights: {kind}."))
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _rows_from(lines, start)]
            cases = rows[0][1:]
            found += [[kind, ENGINE_ROWS.get(row[0], row[0]), *row[1:]] for row in rows[2:]]
    heads = ["Weights", "Decode: ms per step, prefill: tokens/s", *(case.replace("_", " ") for case in cases)]
    return section("Beside other engines", " ".join(ENGINE_RESULTS), heads, found)


def engine_contexts() -> list[str]:
    """Return decode steps of Baton beside the fastest peer, for contexts other than that of `engines`."""
    names = " ".join(ENGINE_CONTEXTS)
    results = [load(name) for name in ENGINE_CONTEXTS]
    found: list[list[str]] = []
    cases = list(results[0]["engines"][0]["seconds"])
    for result in results:
        for weights in ENGINE_RESULTS["engines"]:
            engines = [one for one in result["engines"] if one["weights"] == weights and one["seconds"]]
            ours = next(one["seconds"] for one in engines if one["engine"] == "baton")
            peers = [one["seconds"] for one in engines if one["engine"] != "baton"]
            cells = [
                f"{ours[case]['least'] * 1e3:.1f}/{min(of[case]['least'] for of in peers) / ours[case]['least']:.2f}x"
                if case in ours
                else "-"
                for case in cases
            ]
            found.append([f"{weights}/{result['context_tokens']:,}", *cells])
    heads = ["Weights/context; ms/against best peer", *(case.replace("_", " ") for case in cases)]
    return section("The same, other contexts", names, heads, found)


def _rows_from(lines: list[str], start: int) -> list[str]:
    """Return the lines of the first table at or below `start`."""
    first = next(number for number in range(start, len(lines)) if lines[number].startswith("|"))
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))


def precision() -> list[str]:
    rows = [
        [
            "/".join(_short(row[key]) for key in ("weights", "dtype", "kv")),
            f"{row['perplexity']:.3f}",
            percent(row["greedy_agreement_ratio"], 1),
            f"{row['weight_bytes'] / 1e6:.0f}",
            f"{row['kv_token_bytes'] / 1e3:.1f}",
        ]
        for row in load("precision")["rows"] + load("precision-fp8")["rows"][2:]
    ]
    heads = ["Weights/computation/KV", "Perplexity", "Greedy agreement", "Weights, MB", "KV, KB/token"]
    note = "SmolLM2-135M: `dense` is its Q4_1 file in floats."
    return section("Precision", "precision precision-fp8", heads, rows, note)


def _short(name: str) -> str:
    """Shorten the name of a form: `bfloat16 (mxfp4 tier)`."""
    name = name.replace(" in prefill, ", "+").replace(" in decode", "")
    return re.sub(r", read from a tier in (\w+)(.*)", r" (\1 tier\2)", name)


def decoding() -> list[str]:
    texts = load("speculation")["texts"]

    def pair(figures: dict[str, Any]) -> str:
        without, drafted = (figures[f"tokens_max {n}"]["tokens_per_s"] for n in (0, 8))
        return f"{without:.0f} / {drafted:.0f}"

    rows = [[text, *map(pair, by_requests.values())] for text, by_requests in texts.items()]
    header = ["Tokens/s, without / with drafts; requests at once", *next(iter(texts.values()))]
    lines = section("Speculation by prompt lookup", "speculation", header, rows)
    grammar = load("grammars")["llguidance"]
    rows = [
        ["compile a schema", ms(grammar["compile_s"]["median"])],
        ["mask of one token", ms(grammar["token_s"]["median"])],
    ]
    return lines + section("Structured output", "grammars", ["Figure", "ms"], rows)


def _rate(figures: dict[str, Any] | str | None) -> str:
    """Return GB/s; what failed is told as text in the result."""
    return (figures or "") if not isinstance(figures, dict) else figures["shown"].removesuffix(" GB/s")


def transfers() -> list[str]:
    kinds = ("memcpy", "shm", "tcp", "baton-nixl", "nixl", "nixl-tcp", "mooncake")
    groups = load("transfers")["figures"]
    rows = []
    for group, cases in groups.items():
        for case, figures in cases.items():
            if group == "cut" or (group != "one machine" and "7500" not in case):
                continue
            ways = figures["ways"]
            shown = [_rate(ways.get(kind)) for kind in kinds]
            name = case.removesuffix(" tokens")
            rows.append([name if group == "one machine" else f"{name}, {group.removeprefix('link of ')}", *shown])
    heads = [
        "GB/s by model, tokens, link",
        "memcpy",
        "`shm`",
        "`tcp`",
        "`nixl`",
        "NIXL itself",
        "NIXL over TCP",
        "Mooncake",
    ]
    note = "KV of a prompt in scattered blocks of 16 tokens."
    return section("Transports", "transfers", heads, rows, note) + encryption()


def encryption() -> list[str]:
    figures: dict[str, Any] = load("transfers-tls").get("figures", {}).get("one machine", {})
    kinds = ("memcpy", "tcp", "tls")
    rows = [
        [case.removesuffix(" tokens"), *(_rate(figures[case]["ways"].get(kind)) for kind in kinds)] for case in figures
    ]
    note = "Encryption and decryption take turns on the same cores."
    return section(
        "Encryption", "transfers-tls", ["GB/s by model, tokens", "memcpy", "`tcp`", "`tcp`, encrypted"], rows, note
    )


def streaming(name: str, title: str) -> list[str]:
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in load(name)["rows"]:
        found.setdefault((row["link"], row["tokens"]), {})[row["mode"]] = row["exposed_s"]
    modes = list(next(iter(found.values())))
    largest = max(tokens for _, tokens in found)
    kept = {key: value for key, value in found.items() if key[1] in (2048, largest)}
    rows = [[f"{link}, {tokens}", *(ms(exposed[mode]) for mode in modes)] for (link, tokens), exposed in kept.items()]
    return section(title, name, ["Exposed part of the handoff in ms, by link and prompt tokens", *modes], rows)


def patterns() -> list[str]:
    rows = [
        [
            f"{row['trouble']}, {row['way']}",
            f"{row['ttft_s']:.2f}",
            f"{row['e2e_s']:.2f}",
            f"{row['computed_ratio']:.2f}",
        ]
        for row in load("patterns")["troubles"]
    ]
    heads = ["Fault, handoff", "TTFT, s", "E2E, s", "Prompt tokens computed / asked"]
    note = "Simulated: Llama-3.1-8B, 2P2D, 7,500 tokens, 8 clients, a pool of 100 Gb/s."
    lines = section("Direct handoff and handoff by a pool", "patterns", heads, rows, note)
    rows = [
        [f"{row['prompt_tokens']}, {row['way']}", ms(row["handoff_s"]), f"{row['ttft_s']:.2f}"]
        for row in load("patterns-live")["rows"]
    ]
    heads = ["Prompt tokens, handoff", "Handoff, ms", "TTFT, s"]
    lines += section("The same live, two hosts on one machine", "patterns-live", heads, rows)
    move = load("moves")
    row = [str(move["moves"]), f"{move['pause_steps']['median']:.1f}", f"{move['pause_steps']['max']:.1f}"]
    return lines + section("Live moves of a decoding request", "moves", ["Moves", "Pause, steps, p50", "max"], [row])


def stores() -> list[str]:
    lines = _stores("stores", "Stores")
    return lines + ([] if is_stale("stores-mooncake") else _stores("stores-mooncake", "Mooncake and pool nodes"))


def _stores(name: str, title: str) -> list[str]:
    rows = []
    for store, figures in load(name)["stores"]["1048576"].items():
        cells = [figures.get(key, {}).get("gb_per_s") for key in ("put_one", "get_one", "put_batch", "get_batch")]
        if any(cells):
            rows.append([store, *("" if cell is None else f"{cell:.2f}" for cell in cells)])
    heads = ["GB/s, blocks of 1 MiB", "put, 1 a call", "get", "put, 64 MiB a call", "get"]
    return section(title, name, heads, rows)
