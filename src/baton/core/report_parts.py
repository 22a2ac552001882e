"""What a worker reports besides the counts of its load: learned prices, the pace of its answers, and foreign load."""

from __future__ import annotations

from msgspec import Struct


class StepPrices(Struct, frozen=True, array_like=True, gc=False):
    """The correction of a cost model that a worker has learned from its steps. See `decide/cost/online.py`."""

    speed: float
    """Factor of the whole step. Above 1: steps take longer than the cost model says."""
    factors: tuple[float, ...]
    """Factors of the parts of a step. Empty: only the speed is known."""
    error_ratio: float = 0.0
    """Typical relative error of the prediction of a step."""
    steps: int = 0
    """Number of observed steps."""


class OtherLoad(Struct, frozen=True, array_like=True, gc=False):
    """The requests on a worker that came to it past this cluster, from other clients of the same server."""

    requests: int
    queued_requests: int = 0
    """Number of these whose prompt is not computed."""
    queued_tokens: int = 0
    """Estimate of their prompt tokens."""


class AnswerPace(Struct, frozen=True, array_like=True, gc=False):
    """How far the answers of a worker are ahead of the pace that keeps their TPOT SLOs."""

    token_s: float
    """The shortest pace: seconds per token, a little less than the SLO."""
    ahead_s: float
    """Seconds by which the newest token of each answer came before its pace requires it. The smallest of all answers;
    negative: one is late."""
