"""Whether code of the user's own is at work beside this thread, such as actors that fill a memory of experiences."""

import sys
import threading
from types import FrameType

from lightning_dpx.python_objects.origin import is_installed


def user_code_runs_elsewhere() -> bool:
    """Whether another thread is in a function that is neither Python's nor an installed package's."""
    here = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        if thread == here:
            continue
        frame: FrameType | None = innermost
        # A thread that waits is in a function of Python's, within the one that waits.
        while frame is not None:
            if not is_installed(frame.f_globals.get("__name__")):
                return True
            frame = frame.f_back
    return False
