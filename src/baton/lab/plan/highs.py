"""SciPy's HiGHS, an optional dependency, behind one function."""
# pyright: basic
# SciPy ships no types that the strict mode could read.

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import ConfigError

SECONDS_MAX = 10.0
"""Of one call. What it has found by then is taken."""
GAP_RATIO = 1e-3
"""A solution this close to the bound is good enough: capacities are not known better."""


def minimize(
    goal: Sequence[float], *, rows: Sequence[Sequence[float]], limits: Sequence[float], whole: int
) -> list[float] | None:
    """Minimize goal x with rows x <= limits, x >= 0 and the first `whole` of them whole numbers. None: impossible.

    Raises ConfigError where SciPy is not installed.
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
