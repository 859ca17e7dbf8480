"""The command line names its commands, and tells errors of this package in one line."""

import sys

import pytest

from lightning_dpx.cli import main


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("fit", "plan", "bench", "doctor"))


def test_arguments_that_no_command_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--colour"])
    assert "unrecognized arguments: --colour" in capsys.readouterr().err


def test_an_error_of_this_package_is_a_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--zoo", "--budgets", "0.5"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("dpx: --budgets is for the bench's own models")
    assert "Traceback" not in printed


def test_a_plan_s_arguments_that_are_wrong_are_not_taken_for_a_model_that_does_not_fit() -> None:
    assert main(["plan", "--budget"]) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_their_arguments(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert "doctor" in script
    assert "--budget" in script


def test_completion_without_its_package_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 1
    assert "dpx: Completion needs shtab; pip install 'lightning-dpx[cli]'." in capsys.readouterr().err
