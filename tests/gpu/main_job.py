"""The README's first command, on the device."""

import runpy
import sys
from pathlib import Path
from typing import Any

from tests.gpu.place import Place

_EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def digits(place: Place) -> dict[str, Any]:
    """Trains, tests, and compares its weights with those of one CPU; its own output is the figure."""
    epochs = "8" if place.is_real else "1"
    options = ["--devices", "1", "--strategy", "dpx", "--accelerator", place.accelerator, "--epochs", epochs, "--quiet"]
    sys.argv = [str(_EXAMPLE), *options]
    runpy.run_path(str(_EXAMPLE), run_name="__main__")
    return {"epochs": int(epochs)}
