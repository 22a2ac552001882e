"""Adapter of SciPy's HiGHS solver, an optional dependency."""
# pyright: basic
# SciPy ships no types for pyright's strict mode.

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import ConfigError

SECONDS_MAX = 10.0
"""Time limit of one call. The solver returns its best solution so far."""
GAP_RATIO = 1e-3
"""Relative gap at which the solver stops. Capacities are less accurate than this."""


def minimize(
    goal: Sequence[float], *, rows: Sequence[Sequence[float]], limits: Sequence[float], whole: int
) -> list[float] | None:
    """Return x that minimizes goal x under rows x <= limits and x >= 0, or None if no x satisfies them.

    The first `whole` values of x are integers. Raises ConfigError if SciPy is not installed.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ConfigError(
            "baton plan needs SciPy's solver: .venv/bin/pip install -e '.[plan]' in the checkout"
        ) from error
    found = milp(
        c=np.array(goal),
        constraints=LinearConstraint(np.array(rows), ub=np.array(limits)),  # pyright: ignore[reportArgumentType]
        integrality=np.array([1] * whole + [0] * (len(goal) - whole)),
        bounds=Bounds(0, np.inf),
        options={"time_limit": SECONDS_MAX, "mip_rel_gap": GAP_RATIO},
    )
    return None if found.x is None else [float(value) for value in found.x]
