import re
import subprocess
import sys
from pathlib import Path

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"


def test_digits_reaches_97_percent_with_the_weights_of_one_device() -> None:
    command = [sys.executable, str(DIGITS), "--devices", "4", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", done.stdout)[1])
    difference = float(re.search(r"to one device: ([\d.e+-]+)", done.stdout)[1])
    assert accuracy >= 97
    assert difference <= 1e-5
