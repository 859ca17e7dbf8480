"""Progress is for terminals only, and leaves an empty line."""

import io

import pytest

from lightning_dpx.commands.progress import done, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_last_text_over_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress("first, and longer")
    progress("second")
    assert terminal.getvalue().split("\r")[-1].rstrip() == "dpx: second"
    assert len({len(line) for line in terminal.getvalue().split("\r")[1:]}) == 1, "nothing of the first is left"
    done()
    assert terminal.getvalue().endswith(f"\r{'':100}\r")


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    progress("first")
    done()
    assert file.getvalue() == ""
