"""The bytes of a step whose compiled calls run in one way or another.

bytes   __/''\\____ ... ____/''\\__          more while a call runs, what stays until its backward, which takes
          call          backward          more again
"""

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_dpx.memory.profile.data import CodeRun, CompiledCall


def curve_of_runs(
    curve: np.ndarray, calls: Sequence[CompiledCall], runs: Sequence[CodeRun], stayed: Sequence[int]
) -> np.ndarray:
    """Bytes at every event (E) if each of the calls runs so.

    Args:
        curve: Bytes at every event (E).
        calls: In order.
        runs: How each of them runs.
        stayed: Of each, the bytes that were still there in ``curve`` when it was over.
    """
    change = np.zeros(len(curve) + 2, dtype=np.int64)
    for call, run, before in zip(calls, runs, stayed, strict=True):
        change[call.end] += run.stays - before
        change[call.asked + 1] -= run.stays - before
    found: np.ndarray = curve + np.cumsum(change)[: len(curve)]
    for call, run in zip(calls, runs, strict=True):
        found[call.begin + 1 : call.end] = found[call.begin] + run.forward
        if run.backward >= 0:
            found[call.asked + 1 : call.over] = found[call.asked] + run.backward
    return found


def run_of(call: CompiledCall, shares: Mapping[str, float]) -> CodeRun:
    """How the call runs with these shares, by path: as it was tried with the nearest one."""
    share = shares.get(call.path, 1.0)
    return min(call.runs, key=lambda run: abs(run.share - share))
