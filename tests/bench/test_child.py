"""Processes that work on demand."""

import subprocess
import sys

import pytest

from lightning_dpx.bench.child import Child
from lightning_dpx.errors import BenchError

DOUBLES = """
import json, sys
print("hello")
for line in sys.stdin:
    print(json.dumps({"twice": 2 * int(line)}), flush=True)
"""


def test_a_child_answers_line_by_line_until_it_ends() -> None:
    child = Child([sys.executable, "-S", "-c", DOUBLES], subprocess.DEVNULL)
    for number in (3, 5):
        child.tell(str(number))
        assert child.read("twice") == 2 * number
    child.tell("none")
    with pytest.raises(BenchError, match="ended before it reported twice"):
        child.read("twice")
    child.process.communicate()
