"""``dpx fit`` and its siblings: from the shell, from files, with clear words for a wrong value."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_dpx.cli import main
from tests import programs

ROOT = Path(__file__).parent.parent.parent
DIGITS = "examples/digits.yaml"
# Lightning calls what jsonargparse has deprecated.
quiet = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")


class Tiny(LightningModule):
    """For the shell: counts its rows, and predicts them."""

    def validation_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.log("val_rows", float(len(rows)))

    def predict_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return rows


class TinyData(LightningDataModule):
    """Eight rows."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(8, 2), batch_size=4)  # type: ignore[arg-type]

    predict_dataloader = val_dataloader


def shell(*arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """``dpx`` in the folder of the examples."""
    done = programs.run("-m", "lightning_dpx", *arguments, folder=ROOT)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done


def test_fit_and_then_test_with_a_config(tmp_path: Path) -> None:
    quick = ("--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false")
    files = ("--trainer.default_root_dir", str(tmp_path), "--trainer.enable_checkpointing", "true")
    fitted = shell("fit", "--config", DIGITS, *quick, *files)
    assert "dpx: memory of the last step, in MiB" in fitted.stderr
    assert "work of the last step" in fitted.stderr
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    tested = shell("test", "--config", DIGITS, "--ckpt_path", str(checkpoint))
    assert "accuracy" in tested.stdout


def test_validate_and_predict_run_as_well() -> None:
    config = ("--model", "tests.commands.test_train.Tiny", "--data", "tests.commands.test_train.TinyData")
    options = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.logger", "false")
    assert "val_rows" in shell("validate", *config, *options).stdout
    shell("predict", *config, *options)


def printed(capsys: Any, *arguments: str) -> str:
    """What ``dpx`` prints before it ends, without a process of its own."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert not stopped.value.code
    return str(capsys.readouterr().out)


@quiet
def test_printed_configs_round_trip(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    options = ("--trainer.strategy.memory_budget", "8GiB", "--trainer.strategy.workload", "[2, 1, 1, 1]")
    first = printed(capsys, "fit", "--config", DIGITS, *options, "--print_config")
    arguments = yaml.safe_load(first)["trainer"]["strategy"]["init_args"]
    assert arguments["memory_budget"] == "8GiB"
    assert arguments["workload"] == [2.0, 1.0, 1.0, 1.0]
    again = tmp_path / "again.yaml"
    again.write_text(first)
    assert printed(capsys, "fit", "--config", str(again), "--print_config") == first


@quiet
def test_help_is_a_manual(capsys: Any) -> None:
    manual = printed(capsys, "fit", "--trainer.strategy.help", "lightning_dpx.DPXStrategy")
    for argument in ("reducer", "workload", "memory_budget", "shifts", "communication_dtype", "timeout"):
        assert f"--trainer.strategy.{argument}" in manual
    assert "in this many buckets" in " ".join(manual.split())
    everything = printed(capsys, "--help")
    assert all(command in everything for command in ("fit", "validate", "test", "predict", "plan", "bench", "doctor"))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("reducer", "ncl", "Unknown reducer 'ncl'; available: auto, collective, colocate, hierarchical, naive, nccl"),
        ("execution", "fast", "Literal['auto', 'inline', 'threads']. Got value: fast"),
        ("workload", "[1, 2]", "dpx: workload has 2 entries [1.0, 2.0] for 4 devices; give one per device."),
        ("memory_budget", "8GiBB", "memory_budget='8GiBB' is not allowed"),
        ("planner", "greedy", "Unknown planner 'greedy'; available: auto"),
        ("plan", "missing.yaml", "missing.yaml cannot be read as a plan"),
    ],
)
@quiet
def test_a_wrong_value_names_what_is_allowed(option: str, value: str, said: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    # The same status whoever finds it: the parser, or the strategy.
    assert main(["fit", "--config", DIGITS, f"--trainer.strategy.{option}", value]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_rehearsal_on_simulated_devices() -> None:
    options = ("--trainer.accelerator", "sim", "--trainer.devices", "2", "--trainer.max_epochs", "1")
    simulated = ("--simulate.num_devices", "2", "--simulate.memory", "[64MiB, 1GiB]")
    done = shell("fit", "--config", DIGITS, *options, *simulated, "--trainer.enable_progress_bar", "false")
    rows = [line.split() for line in done.stderr.splitlines() if line.strip().startswith("sim:")]
    assert [row[-1] for row in rows if len(row) > 10] == ["64", "1024"]


def test_plan_and_bench_from_the_shell(tmp_path: Path) -> None:
    report = tmp_path / "report.svg"
    planned = shell("plan", "--config", DIGITS, "--devices", "2", "--budget", "64MiB", "--report", str(report))
    assert [line.split()[0] for line in planned.stdout.splitlines()[2:4]] == ["cuda:0", "cuda:1"]
    assert "<svg" in report.read_text()
    assert shell("plan", "--config", DIGITS, "--budget", "500KiB", ok=False).returncode == 2
    reduced = shell("bench", "reduce", "--sizes", "1000", "--rounds", "1", "--devices", "cpu", "cpu")
    assert "copy limit" in reduced.stdout


def test_without_a_command_it_says_what_there_is(capsys: Any) -> None:
    for arguments, said in (([], "are required: command"), (["doctor", "--fast"], "unrecognized arguments: --fast")):
        assert main(arguments) == 1
        assert said in capsys.readouterr().err
