"""Whether a call still runs: after Ctrl-C torch calls no hook, so what one has entered is left by looking."""

import sys
from types import FrameType


def is_on_stack(call: FrameType) -> bool:
    """Whether this thread is in ``call``, or in what that calls."""
    # The frame of a call that is still running is among the callers of this one.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
