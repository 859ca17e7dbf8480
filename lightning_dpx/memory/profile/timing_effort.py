"""How often steps are timed: until their times are sure, or as rarely as can be.

The environment variable ``LIGHTNING_DPX_TIMING=quick`` is for tests and for trying things out: plans are made two to
three times as fast, they keep their budgets and bits all the same, and what they are said to cost is coarser, so that
another plan than the fastest may be chosen.
"""

import os
import time
from collections.abc import Callable

from lightning_dpx.errors import ConfigurationError

VARIABLE = "LIGHTNING_DPX_TIMING"
_FULL = "full"
_QUICK = "quick"
_SURE = 0.02
_UNSURE = 1000.0  # never: what is timed once may be anything


def is_quick() -> bool:
    """Whether steps are timed as rarely as can be.

    Raises:
        ConfigurationError: The environment variable says something else than "full" or "quick".
    """
    # Read each time, because it may be set while the process runs.
    given = os.environ.get(VARIABLE) or _FULL
    if given not in (_FULL, _QUICK):
        raise ConfigurationError(f'{VARIABLE}={given!r} is not allowed; give "{_FULL}" or "{_QUICK}".')
    return given == _QUICK


def rounds(usual: int) -> int:
    """How many times something is timed that is timed ``usual`` times for a sure figure."""
    if is_quick():
        return 1
    return usual


def seconds(usual: float) -> float:
    """How long something is timed that is timed for ``usual`` seconds for a sure figure."""
    if is_quick():
        return 0.0
    return usual


def uncertainty() -> float:
    """By which share two predicted times of a step must differ for one of them to be the faster for sure.

    Predictions are within a fifth of what a plan adds to a plain step, and that is a tenth of the step as a rule.
    """
    if is_quick():
        return _UNSURE
    return _SURE


def least_seconds(run: Callable[[], object], usual: int, warm: int) -> float:
    """Processor time of ``run``: the least of a few runs, as the differences of such times count, and what others do on
    the same processor only ever adds to one of them.

    Args:
        run: What is timed.
        usual: How many times, for a sure figure.
        warm: How many times before.
    """
    least = float("inf")
    for turn in range(warm + rounds(usual)):
        start = time.thread_time()
        run()
        if turn >= warm:
            least = min(least, time.thread_time() - start)
    return least
