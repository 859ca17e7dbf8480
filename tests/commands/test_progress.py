"""Progress is for terminals only, and leaves an empty line."""

import io

import pytest

from lightning_dpx.commands.progress import done, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "width"), [(40, 39), (80, 79), (200, 100)])
def test_a_terminal_shows_the_last_text_over_the_one_before(
    columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stderr", terminal)
    progress("first, and longer than any terminal is wide: " + "x" * 200)
    progress("second")
    assert terminal.getvalue().split("\r")[-1].rstrip() == "dpx: second"
    assert len({len(line) for line in terminal.getvalue().split("\r")[1:]}) == 1, "nothing of the first is left"
    assert len(terminal.getvalue().split("\r")[-1]) == width, "a line that wraps cannot be written over"
    done()
    assert terminal.getvalue().endswith(f"\r{'':{width}}\r")


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    progress("first")
    done()
    assert file.getvalue() == ""
