"""The command line names its commands, and tells errors of this package in one line."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_dpx.cli import main
from tests import programs
from tests.commands.test_plan import Shallow


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("fit", "plan", "bench", "doctor"))


def test_arguments_that_no_command_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--color"]) == 1
    assert "unrecognized arguments: --color" in capsys.readouterr().err


def test_an_error_of_this_package_is_a_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--zoo", "--budgets", "0.5"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("dpx: --budgets is for the bench's own models")
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["doctor", "--json"], ["--print-completion", "bash"], ["--help"], ["bench", "plan", "--help"]],
    ids=str,
)
def test_a_reader_that_ends_ends_the_command_without_a_word(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = programs.run("-m", "lightning_dpx", *arguments, output=pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_that_ends_ends_training_with_the_same_status() -> None:
    pytest.importorskip("rich")  # prints the summary of the model, and ends the program by itself
    config = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--trainer.fast_dev_run", "true"]
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = programs.run("-m", "lightning_dpx", "fit", *config, "--trainer.accelerator", "cpu", output=pipe)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no file that is always full")
def test_output_that_cannot_be_written_is_told_in_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = programs.run("-m", "lightning_dpx", "doctor", output=full)
    assert (done.returncode, done.stderr) == (1, "dpx: standard output cannot be written: No space left on device\n")


def test_without_a_standard_output_commands_run_all_the_same() -> None:
    command = f"{shlex.quote(sys.executable)} -m lightning_dpx doctor >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["fit", "plan"])
def test_a_config_that_is_no_text_is_told_in_a_line(command: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert main([command, "--config", str(tmp_path / "run.yaml")]) == 1
    assert capsys.readouterr().err.startswith("dpx: A config is no text in UTF-8, as YAML has to be: ")


@pytest.fixture
def _loaders_as_before() -> Iterator[None]:
    """Lightning leaves its own methods on DataLoader where a hook that makes one raises."""
    before = {kind: dict(vars(kind)) for kind in (DataLoader, *DataLoader.__subclasses__())}
    yield
    for kind, attributes in before.items():
        for name in vars(kind).keys() - attributes.keys():
            delattr(kind, name)
        for name in ("__init__", "__setattr__"):
            if name in attributes:
                setattr(kind, name, attributes[name])


@pytest.mark.usefixtures("_loaders_as_before")
@pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_configuration_that_lightning_refuses_is_a_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tests.commands.test_plan.Shallow", "--devices", "cpu"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("dpx: `train_dataloader` must be implemented")
    assert "Traceback" not in printed


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_command_without_a_model_says_how_to_name_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--devices", "2"]) == 1
    assert capsys.readouterr().err.startswith("dpx: Nothing says what is trained: give --config FILE, or --model")


def test_a_plan_s_arguments_that_are_wrong_are_not_taken_for_a_model_that_does_not_fit() -> None:
    assert main(["plan", "--budget"]) == 1


class Ends(Shallow):
    """A program's own status of an end."""

    def __init__(self) -> None:
        super().__init__()
        sys.exit(2)


@pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_only_what_does_not_fit_has_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "tests.commands.test_plan.Shallow", "--data", "tests.lightning.tuning.test_batch_size_tuner.Rows"]
    unreadable = tmp_path / "unreadable.yaml"
    unreadable.write_text("trainer: [\n")
    wrong = [
        ["--trainer.nobody", "1"],
        ["--trainer.max_epochs", "many"],
        ["--config", str(unreadable)],
        ["--config", str(tmp_path / "nowhere.yaml")],
        ["--trainer.strategy", "lightning_dpx.DPXStrategy", "--trainer.strategy.reducer", "nobody"],
        ["--trainer.accelerator", "nobody"],
    ]
    # validate reads its arguments as fit does, and tune as plan does.
    for command, tried in (("fit", wrong), ("validate", wrong[-1:]), ("plan", wrong), ("tune", wrong[-1:])):
        for arguments in tried:
            assert main([command, *own, *arguments]) == 1, (command, arguments)
            assert "Traceback" not in capsys.readouterr().err
    assert main(["bench", "nobody"]) == 1
    assert main(["plan", *own, "--devices", "cuda:0", "--budget", "1KiB"]) == 2
    assert main(["tune", *own, "--devices", "cuda:0", "--budget", "1KiB", "--batch-sizes", "64"]) == 2
    # A program's own status is its own, unless it would say that something does not fit.
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--model", "tests.test_cli.Ends"])
    assert ended.value.code == 2
    assert main(["plan", "--model", "tests.test_cli.Ends"]) == 1


def test_an_option_that_is_misspelt_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "examples/digits.yaml", "--buget", "4MiB"]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith("dpx plan: did you mean --budget? dpx plan --help shows all options.\n")


@pytest.mark.parametrize("command", ["fit", "validate", "plan", "tune"])
def test_an_argument_that_cannot_be_read_is_told_without_pages_of_usage(command: str, capsys: Any) -> None:
    assert main([command, "--config", "examples/digits.yaml", "--trainer.nobody", "1"]) == 1
    shown = "validate" if command == "validate" else "fit"
    said = f"dpx: unrecognized arguments: --trainer.nobody 1\ndpx {shown} --help shows all options.\n"
    assert capsys.readouterr().err == said


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


class InterruptedInAStep(Shallow):
    """Ctrl-C comes while a Trainer runs, which catches it itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return super().training_step(batch, batch_idx)


class InterruptedInTheMaking(Shallow):
    """Ctrl-C comes before there is a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    """A Trainer that was interrupted leaves the signal without effect, perhaps in an earlier test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("model", ["InterruptedInAStep", "InterruptedInTheMaking"])
@pytest.mark.parametrize("command", ["plan", "tune"])
def test_ctrl_c_ends_a_command_with_a_line_and_the_status_of_shells(command: str, model: str, capsys: Any) -> None:
    arguments = [
        "--model",
        f"tests.test_cli.{model}",
        "--data",
        "tests.lightning.tuning.test_batch_size_tuner.Rows",
        "--devices",
        "cpu",
    ]
    assert main([command, *arguments, "--no-plan-cache"]) == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "dpx: interrupted"
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("plan --config examples/digits.yaml --devices cpu --no-plan-cache", b"profiling a step"),
        ("tune --config examples/digits.yaml --devices cpu --batch-sizes 64 --measure", b"training with batches"),
        ("bench step --models tiny --devices 2", b"starting one device"),
    ],
)
def test_ctrl_c_on_a_terminal_wipes_the_line_of_progress_away(arguments: str, shown: bytes) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(Path(__file__).parents[1])
        os.execv(sys.executable, [sys.executable, "-m", "lightning_dpx", *arguments.split()])
    printed = b""
    is_sent = False
    while True:
        try:
            printed += os.read(terminal, 65536)
        # What Linux says of a terminal that its program has left.
        except OSError:
            break
        if shown in printed and not is_sent:
            is_sent = True
            os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    # After the key, as the terminal shows it, the line is overwritten by blanks, and nothing else comes.
    assert printed.partition(b"^C")[2].split() == [b"dpx:", b"interrupted"]
    assert b"Traceback" not in printed
