"""Live and simulated requests beside each other: figures, and the error of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.lab.report.summary import RequestRecord, Results, SloTargets, summarize


def judge(live: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> dict[str, Any]:
    """Compare a run. Its SLO: of each target, what four fifths of the live requests met, so that goodput can differ."""
    targets = SloTargets(
        ttft_s=float(np.quantile([record.ttft_s or 0.0 for record in live], 0.8)),
        tpot_s=float(np.quantile([record.tpot_s or 0.0 for record in live], 0.8)),
    )
    return _compare(summarize(live, slo=targets, wall_s=0.0), summarize(simulated, slo=targets, wall_s=0.0))


def judge_drawn(live: Sequence[RequestRecord], drawn: Sequence[Sequence[RequestRecord]]) -> dict[str, Any]:
    """Compare a run with simulations that drew other noise: the median of each figure, and its range over them."""
    each = [judge(live, simulated) for simulated in drawn]
    rows: dict[str, Any] = {}
    for name, row in each[0].items():
        made = [other[name]["simulated"] for other in each]
        if row["live"] is None or None in made:
            continue
        middle = float(np.median(made))
        rows[name] = {
            "live": row["live"],
            "simulated": middle,
            "error": round(middle / row["live"] - 1, 4) if row["live"] else None,
            "between": [min(made), max(made)],
            "covers": min(made) <= row["live"] <= max(made),
        }
    return rows


def show(topology: str, run: str, rows: dict[str, Any]) -> None:
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    told = "  ".join(f"{name} {error:+.1%}" for name, error in errors.items() if error is not None)
    print(f"{topology:6} {run:60} {told}", flush=True)


def _compare(live: Results, simulated: Results) -> dict[str, Any]:
    """Return live and simulated figures, and the relative error of each."""
    rows: dict[str, Any] = {}
    pairs = {
        "ttft_s": (live.ttft_s, simulated.ttft_s),
        "tpot_s": (live.tpot_s, simulated.tpot_s),
        "e2e_s": (live.e2e_s, simulated.e2e_s),
    }
    for metric, (real, made) in pairs.items():
        rows[f"{metric} mean"] = _row_of(real.mean, made.mean)
        rows[f"{metric} p50"] = _row_of(real.p50, made.p50)
        rows[f"{metric} p90"] = _row_of(real.p90, made.p90)
        rows[f"{metric} p99"] = _row_of(real.p99, made.p99)
    rows["goodput_rps"] = _row_of(live.goodput_rps, simulated.goodput_rps)
    rows["prefix_hit_ratio"] = {"live": live.prefix_hit_ratio, "simulated": simulated.prefix_hit_ratio}
    return rows


def _row_of(real: float | None, made: float | None) -> dict[str, float | None]:
    error = None if not real or made is None else round(made / real - 1, 4)
    return {"live": real, "simulated": made, "error": error}
