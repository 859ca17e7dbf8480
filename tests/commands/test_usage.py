"""A parser's end of the program is that of an error, and other ends are what they are."""

import argparse

import pytest

from lightning_dpx.commands.usage import ERROR, UnreadableArguments, reading_arguments


def test_a_parser_that_refuses_ends_with_the_status_of_an_error() -> None:
    with pytest.raises(UnreadableArguments) as ended, reading_arguments():
        argparse.ArgumentParser().parse_args(["--nobody"])
    assert ended.value.code == ERROR


def test_a_parser_that_helps_ends_as_it_does() -> None:
    with pytest.raises(SystemExit) as ended, reading_arguments():
        argparse.ArgumentParser().parse_args(["--help"])
    assert ended.value.code == 0
