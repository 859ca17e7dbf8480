"""``dpx tune`` predicts, measures and writes the batch size that is fastest and fits."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_dpx as dpx
from lightning_dpx.cli import main
from tests.commands.test_plan import Shallow
from tests.conftest import SIMULATED

# Lightning calls what jsonargparse has deprecated.
pytestmark = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")


def config(
    folder: Path, data: str = "tests.lightning.tuning.test_batch_size_tuner.Rows", strategy: str = "auto"
) -> str:
    path = folder / "config.yaml"
    path.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 1\n  max_epochs: 1\n  logger: false\n  enable_checkpointing: false\n"
        f"  strategy: {strategy}\n"
        "model:\n  class_path: tests.commands.test_plan.Shallow\n"
        f"data:\n  class_path: {data}\n"
    )
    return str(path)


def tuned(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["tune", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_a_table_of_batch_sizes_for_devices_that_are_not_there(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path), "--devices", "cuda:0,cuda:1", "--batch-sizes", "128,256"]
    assert main(["tune", *arguments, "--precisions", "32-true,bf16-mixed"]) == 0
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert "predicted from fake tensors for cuda:0" in title
    assert heads.split()[:3] == ["batch", "size", "precision"]
    assert [row.split()[:4] for row in rows] == [
        [size, precision, half, half]
        for precision in ("32-true", "bf16-mixed")
        for size, half in (("128", "64"), ("256", "128"))
    ]
    assert sum("<- best" in row for row in rows) == 1


def test_peaks_are_in_a_unit_that_shows_them(tmp_path: Path, capsys: Any) -> None:
    """As in the table of ``dpx plan``: a small model took 0.0 MiB."""
    arguments = ["--config", config(tmp_path), "--devices", "cuda:0", "--batch-sizes", "1,2", "--budget", "900KiB"]
    main(["tune", *arguments])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "peak of the tightest device in KiB" in title
    for row in rows:
        peak, budget = row.split()[6:8]
        assert float(peak) >= 1
        assert float(budget) == 900


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("command", [["plan"], ["tune", "--batch-sizes", "64"]], ids=["plan", "tune"])
def test_the_first_line_tells_whether_a_device_was_used(command: list[str], tmp_path: Path, capsys: Any) -> None:
    arguments = [*command, "--config", config(tmp_path), "--devices", "sim:0"]
    try:
        assert main(arguments) == 0
        assert "predicted from a step that was run on sim:0, with the times" in capsys.readouterr().out.splitlines()[0]
        assert main([*arguments, "--dry"]) == 0
        assert "predicted from fake tensors for sim:0" in capsys.readouterr().out.splitlines()[0]
        with pytest.warns(UserWarning, match="does not fit on sim:0 as it is, so it is predicted from fake tensors"):
            assert main([*arguments, "--simulate.memory", "1KiB"]) == 0
        assert "predicted from fake tensors for sim:0" in capsys.readouterr().out.splitlines()[0]
    finally:
        dpx.simulate(8)


def test_the_best_is_written_as_a_config_that_fits_follows(tmp_path: Path, capsys: Any) -> None:
    saved, page = tmp_path / "tuned.yaml", tmp_path / "tuned.html"
    arguments = ["--config", config(tmp_path), "--devices", "1", "--batch-sizes", "128,512", "--budget", "1MiB"]
    assert main(["tune", "--json", *arguments, "--save", str(saved), "--report", str(page)]) == 0
    captured = capsys.readouterr()
    (best,) = [row for row in json.loads(captured.out)["batch_sizes"] if row["best"]]
    assert f"batch_size={best['batch_size']} is written to {saved}" in captured.err
    assert "predicted is for cuda:0, and the config trains with accelerator='cpu'; name the devices" in captured.err
    written = yaml.safe_load(saved.read_text())
    assert written["data"]["init_args"]["batch_size"] == best["batch_size"]
    assert written["trainer"]["strategy"]["class_path"] == "lightning_dpx.DPXStrategy"
    assert written["trainer"]["strategy"]["init_args"] == {"memory_budget": "1MiB", "micro_batches": "auto"}
    assert page.read_text().count("<svg") == 1
    assert main(["fit", "--config", str(saved), "--trainer.fast_dev_run", "1"]) == 0


def test_a_config_with_an_accelerator_that_is_everywhere_means_it(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path), "--batch-sizes", "64", "--trainer.accelerator", "cpu"]
    for devices in (["--trainer.devices", "auto"], ["--trainer.devices", "2"]):
        _, found = tuned(capsys, *arguments, *devices)
        assert found["batch_sizes"][0]["device"] == "cpu"
    # A number is of CUDA devices, which need not be here.
    _, found = tuned(capsys, *arguments, "--devices", "2")
    assert found["batch_sizes"][0]["device"] == "cuda:0"


def test_the_fastest_are_measured(tmp_path: Path, capsys: Any) -> None:
    own = config(tmp_path, strategy="dpx")
    status, found = tuned(capsys, "--config", own, "--batch-sizes", "32,64,128,256", "--devices", "cpu", "--measure")
    assert status == 0
    measured = [row for row in found["batch_sizes"] if row["measured_samples_per_second"]]
    assert len(measured) == 3
    fastest = max(measured, key=lambda row: row["measured_samples_per_second"])
    assert [row for row in found["batch_sizes"] if row["best"]] == [fastest]


CALLBACKS = """
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    - class_path: lightning.pytorch.callbacks.TQDMProgressBar
    - class_path: lightning.pytorch.callbacks.RichModelSummary
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
"""


@pytest.mark.parametrize("command", [["plan"], ["tune", "--measure", "--batch-sizes", "64"]], ids=["plan", "tune"])
def test_callbacks_of_a_run_are_no_hindrance(
    command: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(config(tmp_path))
    text = own.read_text().replace("  logger: false\n  enable_checkpointing: false\n", CALLBACKS[1:])
    own.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--json", "--no-plan-cache", "--config", str(own), "--devices", "cpu"]) == 0
    # Nothing was printed beside, and nothing written.
    assert json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == [own]


class AsksItsLogger(Shallow):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("seen", 1.0, batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_step_finds_the_logger_that_it_asks_for(command: str, tmp_path: Path, capsys: Any) -> None:
    own = Path(config(tmp_path))
    text = own.read_text().replace("  logger: false\n", "").replace("test_plan.Shallow", "test_tune.AsksItsLogger")
    own.write_text(text)
    assert main([command, "--json", "--config", str(own), "--devices", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_the_strategy_of_the_config_keeps_its_other_options(tmp_path: Path, capsys: Any) -> None:
    saved = tmp_path / "tuned.yaml"
    own = config(tmp_path, strategy="{class_path: lightning_dpx.DPXStrategy, init_args: {reducer: naive}}")
    arguments = ["--config", own, "--devices", "2", "--batch-sizes", "64", "--micro-batches", "2", "--save", str(saved)]
    assert main(["tune", *arguments]) == 0
    written = yaml.safe_load(saved.read_text())["trainer"]
    assert written["devices"] == 2
    assert written["strategy"]["init_args"]["reducer"] == "naive"
    assert written["strategy"]["init_args"]["micro_batches"] == 2
    said = "Whether micro-batches give what one device gives is checked before the first step of a run."
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_devices_that_are_named_are_those_of_the_saved_config(tmp_path: Path, capsys: Any) -> None:
    saved = tmp_path / "tuned.yaml"
    arguments = ["--config", config(tmp_path), "--devices", "cuda:0,cuda:2", "--batch-sizes", "64"]
    assert main(["tune", *arguments, "--save", str(saved)]) == 0
    assert "the config trains with" not in capsys.readouterr().err
    # They are not here, so it is only read.
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(saved), "--print_config"])
    assert end.value.code == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["accelerator"], trainer["devices"]) == ("cuda", [0, 2])


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_config_for_devices_by_name_trains_on_them(tmp_path: Path) -> None:
    saved = tmp_path / "tuned.yaml"
    arguments = ["--config", config(tmp_path), "--devices", "sim:0,sim:2", "--batch-sizes", "64", "--save", str(saved)]
    rows = tmp_path / "memory.json"
    callbacks = ["--trainer.callbacks", "lightning_dpx.DeviceMemoryMonitor", "--trainer.callbacks.save_to", str(rows)]
    try:
        assert main(["tune", *arguments]) == 0
        assert main(["fit", "--config", str(saved), *callbacks, "--trainer.max_steps", "1"]) == 0
    finally:
        dpx.simulate(8)
    assert [row["device"] for row in json.loads(rows.read_text())] == ["sim:0", "sim:2"]


def test_batches_that_the_data_set_cannot_fill_are_not_measured(tmp_path: Path, capsys: Any) -> None:
    """Of 2,048 rows."""
    own = config(tmp_path)
    arguments = ["tune", "--json", "--config", own, "--devices", "cpu", "--measure", "--batch-sizes"]
    assert main([*arguments, "256,8192"]) == 0
    captured = capsys.readouterr()
    assert "the data set has 2048 rows, so larger batches are predicted and would never be full" in captured.err
    small, large = json.loads(captured.out)["batch_sizes"]
    assert small["best"]
    assert small["measured_samples_per_second"] > 0
    assert large["measured_samples_per_second"] is None
    assert main([*arguments, "8192"]) == 0
    captured = capsys.readouterr()
    assert "no batch size was measured; the best one is that of the prediction" in captured.err
    assert [row["best"] for row in json.loads(captured.out)["batch_sizes"]] == [True]


class StopsEarly(Shallow):
    """Ends every fit after two steps, of which the first ones never count."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.global_step >= 2


def test_a_run_that_ends_too_early_measures_nothing(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path), "--devices", "cpu", "--measure", "--batch-sizes", "64"]
    assert main(["tune", *arguments, "--model", "tests.commands.test_tune.StopsEarly"]) == 0
    captured = capsys.readouterr()
    assert "batches of 64 rows are not measured: fewer than 8 came that were full" in captured.err


def test_limits_of_the_config_do_not_end_a_measured_run(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path), "--devices", "cpu", "--measure", "--batch-sizes", "64"]
    status, found = tuned(capsys, *arguments, "--trainer.max_steps", "2")
    assert status == 0
    assert found["batch_sizes"][0]["measured_samples_per_second"] > 0


def test_a_file_that_cannot_be_written_in_the_end_is_told_by_its_option(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path), "--devices", "cuda:0", "--batch-sizes", "64"]
    # Of all folders, this one takes no file from anybody.
    assert main(["tune", *arguments, "--save", "/proc/tuned.yaml"]) == 1
    assert "--save /proc/tuned.yaml " in capsys.readouterr().err


def test_where_nothing_fits_the_status_says_so(tmp_path: Path, capsys: Any) -> None:
    saved = tmp_path / "tuned.yaml"
    arguments = ["--config", config(tmp_path), "--devices", "cuda:0", "--batch-sizes", "64", "--budget", "2KiB"]
    assert main(["tune", *arguments, "--save", str(saved)]) == 2
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert "No batch size meets the budget of every device" in captured.err
    assert not saved.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch-sizes", "64,many"], "--batch-sizes 64,many is not allowed; give positive numbers: 32,64,128"),
        (["--batch-sizes", "0"], "--batch-sizes 0 is not allowed"),
        (["--budget", "lots"], "--budget='lots' is not allowed"),
        (["--budget", "60%"], "--budget='60%' is not allowed: a share would be another budget for every batch size"),
        (["--micro-batches", "none"], "--micro-batches none is not allowed"),
        (["--save", "nowhere/run.yaml"], "--save nowhere/run.yaml is not allowed: there is no folder nowhere"),
        (["--report", "report.doc"], "--report report.doc is not allowed; name an .html"),
        (
            ["--save", "x.yaml", "--batch-size-key", "data.rows"],
            "--batch-size-key data.rows is not allowed: the config",
        ),
        (
            ["--save", "x.yaml", "--batch-size-key", "data.init_args"],
            "it is a section of the config; name a key within",
        ),
        (["--precisions", "32-true,"], "--precisions 32-true, is not allowed; give names: 32-true,bf16-mixed"),
        (["--devices", "-1"], "devices='-1' means all that a machine has, and the devices need not be here"),
        (
            ["--trainer.devices", "auto", "--trainer.accelerator", "gpu"],
            "devices='auto' means all that a machine has",
        ),
        (["--trainer.nobody", "1"], "nobody"),
    ],
)
def test_bad_arguments(
    options: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where one that is not refused would write
    assert main(["tune", "--config", config(tmp_path), *options]) == 1
    assert said in capsys.readouterr().err


def test_a_config_without_a_batch_size_must_name_its_place(tmp_path: Path, capsys: Any) -> None:
    own = config(tmp_path, data="tests.commands.test_plan.Rows")
    assert main(["tune", "--config", own, "--save", str(tmp_path / "tuned.yaml")]) == 1
    assert "says it in none of data.init_args.batch_size, data.batch_size" in capsys.readouterr().err
