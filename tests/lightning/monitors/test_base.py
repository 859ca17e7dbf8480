"""When a step is measured, and where its figures go."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.lightning.monitors.base import Pace, check_file, format_rows, short_name, write_rows
from tests.conftest import assert_equal, make_loader, make_trainer, seeded
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
