"""A bar on standard error, for those who wait long enough, and look."""

import io
import sys
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn

from lightning_dpx import progress
from lightning_dpx.memory import search_plan
from tests import programs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def planned(file: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """What planning writes to ``file``."""
    monkeypatch.setattr(sys, "stderr", file)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    search_plan(net, torch.randn(64, 64), budget=0.7, **options)
    return str(file.getvalue())


def test_a_bar_stays_in_one_row_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, planned(Terminal(), monkeypatch).split("\r"))) <= 39


def test_a_bar_shows_how_far_planning_is_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    told = planned(Terminal(), monkeypatch)
    assert "dpx: planning memory, 0 s: timing steps" in told
    assert "trying operators" in told
    assert "[###" in told
    assert "choosing what to compute again" in told
    assert told.endswith(" \r")
    assert max(map(len, told.split("\r"))) <= 79


def test_nothing_is_written_to_those_who_do_not_look_or_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(Terminal(), monkeypatch) == ""  # over before anybody waits
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    assert planned(io.StringIO(), monkeypatch) == ""
    assert planned(Terminal(), monkeypatch, progress=False) == ""


def _fail() -> None:
    with progress.shown("dividing"):
        progress.at("by zero", 1, 2)
        raise ZeroDivisionError


def test_an_error_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    with pytest.raises(ZeroDivisionError):
        _fail()
    assert file.getvalue().endswith(" \r")
    progress.at("after it")  # goes nowhere
    assert "after" not in file.getvalue()


IMPORT = "from lightning_dpx import progress"  # with what libraries say of their import
SHOWS = """
setattr(progress, "_PATIENCE", 0.0)
setattr(progress, "_PAUSE", 0.0)
bar = progress.shown("planning memory")
bar.__enter__()
progress.at("timing steps")
progress.at("trying operators", 1, 2)
"""
ENDS = "_ = bar.__exit__(None, None, None)"
SHOWN = "dpx: planning memory, 0 s: trying operators [##########          ]  50%"


def test_a_cell_of_a_notebook_shows_how_far_it_is_and_is_empty_in_the_end() -> None:
    """In a kernel of its own, as a person runs it."""
    cells = [nbformat.v4.new_code_cell(source) for source in (IMPORT, SHOWS, ENDS, SHOWS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with programs.quick_interpreter():
        NotebookClient(notebook, kernel_name="python3", timeout=200).execute()
    _, ended, ends, shows = notebook.cells
    # One output each, and none on standard error.
    for cell, text in ((ended, ""), (shows, SHOWN)):
        outputs = [(output.output_type, output.get("data")) for output in cell.outputs]
        assert outputs == [("display_data", {"text/plain": text})]
    assert ends.outputs == []
