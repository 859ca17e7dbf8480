"""What happens next, for people who wait: on a terminal only."""

import sys

from lightning_dpx.progress import line_width

_WIDTH = 100


def progress(text: str) -> None:
    """Tells it on standard error, over what was told before; nothing without a terminal."""
    if sys.stderr.isatty():
        width = line_width(_WIDTH)
        # Padded, so that a longer text that was there before does not show behind this one.
        sys.stderr.write(f"\r{f'dpx: {text}'[:width]:{width}}")
        sys.stderr.flush()


def done() -> None:
    """Wipes away what :func:`progress` has written last."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{'':{line_width(_WIDTH)}}\r")
        sys.stderr.flush()
