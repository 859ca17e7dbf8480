"""A parser's end of the program is that of an error, and other ends are what they are."""

import argparse
import warnings
from pathlib import Path

import pytest

from lightning_dpx.commands import usage
from lightning_dpx.commands.usage import ERROR, UnreadableArguments, reading_arguments, warnings_in_words


def test_a_parser_that_refuses_ends_with_the_status_of_an_error() -> None:
    with pytest.raises(UnreadableArguments) as ended, reading_arguments():
        argparse.ArgumentParser().parse_args(["--nobody"])
    assert ended.value.code == ERROR


def test_a_parser_that_helps_ends_as_it_does() -> None:
    with pytest.raises(SystemExit) as ended, reading_arguments():
        argparse.ArgumentParser().parse_args(["--help"])
    assert ended.value.code == 0


def test_warnings_of_this_package_are_lines_without_a_place() -> None:
    here = str(Path(usage.__file__))
    as_before = warnings.formatwarning("of a library", UserWarning, "/elsewhere.py", 3)
    with warnings_in_words():
        assert warnings.formatwarning("few rows", UserWarning, here, 3) == "dpx: few rows\n"
        assert warnings.formatwarning("dpx: whole", UserWarning, "/lightning.py", 3) == "dpx: whole\n"
        assert warnings.formatwarning("of a library", UserWarning, "/elsewhere.py", 3) == as_before
    assert "usage.py:3" in warnings.formatwarning("few rows", UserWarning, here, 3)
