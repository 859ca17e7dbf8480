"""When a step is measured, and where its figures go."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_dpx as dpx
from lightning_dpx.lightning.monitors.base import Pace, check_file, format_rows, short_name, write_rows
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, seeded
from tests.lightning.several_replicas import on_replicas


@pytest.mark.parametrize("argument", ["save_to", "report"])
def test_a_report_that_cannot_be_written_is_told_before_training(argument: str, tmp_path: Path) -> None:
    suffix = "csv" if argument == "save_to" else "html"
    (tmp_path / "file").write_text("")
    monitor = dpx.DeviceMemoryMonitor(table=False, **{argument: tmp_path / "file" / f"memory.{suffix}"})
    model = seeded()
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(dpx.ConfigurationError, match=rf"{argument}=.* cannot be written: .*file is no folder"):
        make_trainer(callbacks=[monitor], **on_replicas()).fit(model, make_loader(), make_loader())
    assert_equal(dict(model.state_dict()), before, bitwise=True)


def test_the_first_steps_and_every_so_many_are_measured() -> None:
    trainer = make_trainer(log_every_n_steps=5)
    assert [number for number in range(1, 12) if number in measured(Pace(3), trainer)] == [1, 2, 3, 6, 9]
    assert measured(Pace(None), trainer) == [1, 2, 5, 10]
    pace = Pace(100)
    measured(pace, trainer)
    pace.restart()
    assert measured(pace, trainer) == [1, 2]


def measured(pace: Pace, trainer: Any) -> list[int]:
    return [number for number in range(1, 12) if pace.step(trainer)]


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "3"])
def test_a_pace_that_is_no_positive_integer_is_refused(every: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="every_n_steps="):
        Pace(every)


def test_rows_are_written_as_the_file_s_name_says(tmp_path: Path) -> None:
    rows = [{"step": 1, "peak": 5}, {"step": 2, "peak": 6}]
    write_rows(tmp_path / "new" / "a.csv", rows)
    assert (tmp_path / "new" / "a.csv").read_text().split() == ["step,peak", "1,5", "2,6"]
    write_rows(tmp_path / "a.json", rows)
    assert json.loads((tmp_path / "a.json").read_text()) == rows
    with pytest.raises(dpx.ConfigurationError, match=r"name a \.csv or a \.json file"):
        check_file("a.txt")


def test_a_table_is_aligned_and_names_of_devices_have_no_colon() -> None:
    assert format_rows("title", ["a", "long"], [["100", "2"]]) == "title\n  a  long\n100     2"
    assert short_name(torch.device("cuda", 1)) == "cuda1"
    assert short_name(torch.device("cpu")) == "cpu"


MONITORS = [dpx.DeviceMemoryMonitor, dpx.DeviceThroughputMonitor]


class Fails(Classifier):
    """Raises at a place that the test names: a step of training, or a validation."""

    at_step = -1
    in_validation = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.at_step:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.in_validation:
            raise KeyError("the user's own")


def fit(monitor: Callback, model: Fails, **options: Any) -> None:
    callbacks = [monitor, *options.pop("callbacks", [])]
    options = {"max_epochs": 1, "limit_val_batches": 0, "log_every_n_steps": 1, **options}
    make_trainer(callbacks=callbacks, **options).fit(model, make_loader(), make_loader())


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in json.loads(path.read_text())]


@pytest.mark.parametrize("kind", MONITORS)
def test_an_error_after_a_fit_leaves_its_report_as_it_is(kind: Any, tmp_path: Path, caplog: Any) -> None:
    monitor = kind(save_to=tmp_path / "a.json", every_n_steps=1)
    model = Fails()
    trainer = make_trainer(callbacks=[monitor], max_epochs=1)
    trainer.fit(model, make_loader(), make_loader())
    (tmp_path / "a.json").write_text("read and kept by the user")
    model.in_validation = True
    caplog.clear()
    for _ in range(2):
        with caplog.at_level("INFO"), pytest.raises(KeyError):
            trainer.validate(model, make_loader())
    assert (tmp_path / "a.json").read_text() == "read and kept by the user"
    assert sum("of the last step" in record.message for record in caplog.records) == 0


@pytest.mark.parametrize("kind", MONITORS)
def test_a_fit_replaces_the_report_of_another_once_it_has_measured_something(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    monitor = kind(table=False, save_to=path, every_n_steps=1)
    model = Fails()
    fit(monitor, model)
    assert steps_in(path) == [0, 1, 2, 3]
    # Before its first step was measured.
    model.at_step = 0
    with pytest.raises(KeyError):
        fit(monitor, model)
    assert steps_in(path) == [0, 1, 2, 3]
    # Without any step.
    model.at_step = -1
    fit(monitor, model, max_epochs=0)
    assert steps_in(path) == [0, 1, 2, 3]
    model.at_step = 2
    with pytest.raises(KeyError):
        fit(monitor, model)
    assert steps_in(path) == [0, 1]


def test_a_fit_without_a_step_leaves_a_file_that_tools_can_read(tmp_path: Path) -> None:
    fit(dpx.DeviceMemoryMonitor(save_to=tmp_path / "a.json"), Fails(), max_epochs=0)
    assert steps_in(tmp_path / "a.json") == []


class MakesFolders(Callback):
    """Makes folders where files were to be written, in the middle of a fit."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def on_train_batch_end(self, *_: Any) -> None:
        for path in self.paths:
            path.mkdir(exist_ok=True)


@pytest.mark.parametrize("kind", MONITORS)
def test_a_report_that_cannot_be_written_in_the_end_costs_no_fit(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    model = Fails()
    with pytest.warns(UserWarning, match=r"The report .*a\.json is not written: Is a directory"):
        fit(kind(table=False, save_to=path), model, callbacks=[MakesFolders(path)])
    assert model.trainer.state.finished


@pytest.mark.parametrize("kind", MONITORS)
def test_a_report_that_cannot_be_written_hides_no_other_error(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    model = Fails()
    model.at_step = 2
    with pytest.warns(UserWarning, match=r"a\.json is not written"), pytest.raises(KeyError, match="the user's own"):
        fit(kind(table=False, save_to=path), model, callbacks=[MakesFolders(path)])


def test_a_page_that_cannot_be_written_in_the_end_costs_no_fit(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    model = Fails()
    with pytest.warns(UserWarning, match=r"The report .*a\.html is not written: Is a directory"):
        fit(dpx.DeviceMemoryMonitor(table=False, report=page), model, callbacks=[MakesFolders(page)])
    assert model.trainer.state.finished
