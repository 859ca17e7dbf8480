"""``dpx plan`` predicts what the devices of a config would hold, without them, and is right."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.cli import main
from lightning_dpx.units import parse_bytes
from tests.conftest import SIMULATED, make_trainer

# Lightning calls what jsonargparse has deprecated.
pytestmark = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


class Deep(LightningModule):
    """Rows (B, 64) through layers of width 64 to one number."""

    def __init__(self, dropout: float = 0.1, depth: int = 8) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(dropout)) for _ in range(depth)
        ]
        self.net = nn.Sequential(*layers, nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Shallow(Deep):
    """Half of the layers, which are planned in a quarter of the time."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout, depth=4)


class Wide(Shallow):
    """Weights that take as much as activations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(size, 1024 - size), nn.GELU()) for size in (64, 960, 64)))
        self.net.append(nn.Linear(960, 1))


class Normed(Shallow):
    """With statistics over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].append(nn.BatchNorm1d(64))


class Rows(LightningDataModule):
    """Three batches of 1024 rows."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(3072, 64), torch.randn(3072, 1)), 1024)


class NoBackward(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByHand(NoBackward):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class FewRows(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(10, 64), torch.randn(10, 1)), 10)


class NoRows(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(0, 64), torch.randn(0, 1)), 1024)


def config(folder: Path, strategy: str = "{}", model: str = "Deep", data: str = "Rows") -> str:
    """For four GPUs, which no test machine must have."""
    path = folder / "config.yaml"
    path.write_text(
        "trainer:\n  accelerator: gpu\n  devices: 4\n  max_epochs: 1\n  precision: 32-true\n"
        "  callbacks:\n    - class_path: lightning_dpx.DeviceMemoryMonitor\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        f"  strategy:\n    class_path: lightning_dpx.DPXStrategy\n    init_args: {strategy}\n"
        f"model:\n  class_path: tests.commands.test_plan.{model}\n"
        f"data:\n  class_path: tests.commands.test_plan.{data}\n"
    )
    return str(path)


def planned(capsys: Any, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["plan", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == (status == 0)
    return status, found["devices"]


@sim_only
@pytest.mark.parametrize("reducer", ["collective", "colocate"])
@pytest.mark.parametrize("budget", [None, "1700KiB"])
def test_the_prediction_is_what_a_run_on_such_devices_takes(
    reducer: str, budget: str | None, tmp_path: Path, capsys: Any
) -> None:
    options = f"{{reducer: {reducer}, workload: [3, 2, 2, 1], memory_budget: {budget or 'null'}, gradient_buckets: 0}}"
    status, devices = planned(capsys, "--config", config(tmp_path, options))
    assert status == 0
    assert [device["device"] for device in devices] == [f"cuda:{index}" for index in range(4)]
    assert [device["rows"] for device in devices] == [384, 256, 256, 128]
    gc.collect()  # what other tests left on the devices
    monitor = dpx.DeviceMemoryMonitor(table=False, every_n_steps=1)
    strategy = dpx.DPXStrategy(
        reducer=reducer, workload=[3, 2, 2, 1], memory_budget=budget, gradient_buckets=0, execution="inline"
    )
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=4, max_epochs=1, callbacks=[monitor])
    trainer.fit(Deep(), datamodule=Rows())
    for index, device in enumerate(devices):
        taken = max(monitor.last[torch.device("sim", index)].peak_by_phase.values())
        # Gradients count all through the step; here they come while activations go.
        assert device["peak"] - device["gradients"] <= taken * 1.02, index
        assert taken <= device["peak"] * 1.02, index


@sim_only
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_prediction_for_one_device_counts_gradients_as_its_run_does(
    micro_batches: int, tmp_path: Path, capsys: Any
) -> None:
    options = f"{{memory_budget: 32MiB, micro_batches: {micro_batches}}}"
    status, devices = planned(capsys, "--config", config(tmp_path, options, model="Wide"), "--devices", "cuda:0")
    assert status == 0
    gc.collect()  # what other tests left on the devices
    monitor = dpx.DeviceMemoryMonitor(table=False, every_n_steps=1)
    strategy = dpx.DPXStrategy(memory_budget="32MiB", micro_batches=micro_batches, plan_cache=False)
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=1, max_epochs=1, callbacks=[monitor])
    trainer.fit(Wide(), datamodule=Rows())
    taken = max(monitor.last[torch.device("sim", 0)].peak_by_phase.values())
    assert devices[0]["peak"] == pytest.approx(taken, rel=0.02)
    # What is shown of it adds up, whenever gradients come.
    assert monitor.last[torch.device("sim", 0)].planned == pytest.approx(taken, rel=0.02)


def test_a_plan_is_saved_drawn_and_followed(tmp_path: Path, capsys: Any) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "report.html"
    arguments = [
        "--config",
        config(tmp_path, model="Shallow"),
        "--budget",
        "1MiB",
        "--save",
        str(plan),
        "--report",
        str(page),
    ]
    assert main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split()[:3] == ["device", "rows", "parameters"]
    assert "plan of cuda:0:" in printed
    assert "predicted from fake tensors for cuda:0: times by FLOPs and bytes" in printed.splitlines()[0]
    assert dpx.MemoryPlan.load(plan).dropped
    assert dpx.MemoryPlan.load(plan).basis.startswith("from fake tensors for cuda:0")
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    strategy = dpx.DPXStrategy(plan=str(plan), execution="inline")
    # The plan is that of more devices, each of which has fewer rows.
    with pytest.warns(UserWarning, match=r"a step needs about .* in its backward, where the plan has a budget of"):
        make_trainer(strategy=strategy, devices=2, max_epochs=1).fit(Shallow(), datamodule=Rows())


class Looks(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else loss * 0.0


def test_a_step_that_looks_at_numbers_runs_on_a_part_of_the_rows(tmp_path: Path, capsys: Any) -> None:
    _, expected = planned(capsys, "--config", config(tmp_path))
    with pytest.warns(UserWarning, match=r"step of Looks .*_local_scalar_dense.*test_plan.py:\d+") as told:
        assert main(["plan", "--json", "--config", config(tmp_path, "{workload: [1, 2, 3, 4]}", "Looks")]) == 0
    assert len({str(warning.message) for warning in told}) == 1, "Python shows it once, however many slices there are"
    capsys.readouterr()
    with pytest.warns(UserWarning, match="step of Looks"):
        assert main(["plan", "--json", "--config", config(tmp_path, model="Looks")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["basis"].startswith("from real steps on 32 and 64 of 256 rows, scaled, for cuda:0")
    for ours, theirs in zip(found["devices"], expected, strict=True):
        assert ours["unplanned"] == pytest.approx(theirs["unplanned"], rel=0.02)


@pytest.mark.parametrize(("devices", "budget"), [("cuda:0", "4MiB"), ("cpu", "8MiB")])
def test_a_step_by_hand_takes_what_the_same_step_takes(devices: str, budget: str, tmp_path: Path, capsys: Any) -> None:
    """Its optimizer adds what it needs for itself, which is less than activations take."""
    found = []
    for model in ("Deep", "ByHand"):
        path = config(tmp_path, model=model)
        assert main(["plan", "--json", "--config", path, "--devices", devices, "--budget", budget]) == 0
        found.append(json.loads(capsys.readouterr().out)["devices"][0])
    assert found[1]["unplanned"] == pytest.approx(found[0]["unplanned"], rel=0.01)
    for each in found:
        assert each["peak"] <= parse_bytes("budget", budget) < each["unplanned"]


def test_what_was_planned_before_is_found_again(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "plans"
    arguments = ["--config", config(tmp_path, model="Shallow"), "--budget", "1MiB", "--plan-cache", str(folder)]
    assert main(["plan", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    first = json.loads(captured.out)["devices"]
    assert "cache" not in captured.err, "the plan of one device is that of the next, and has only just been made"
    entries = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(["plan", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["devices"] == first
    assert f"the memory plan was found in the cache, in {folder}" in captured.err
    assert {path.name for path in folder.iterdir()} == set(entries)
    assert main(["plan", "--json", *arguments[:-2], "--no-plan-cache"]) == 0
    assert "cache" not in capsys.readouterr().err


def test_a_step_for_the_host_is_measured(tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", "--json", "--config", config(tmp_path), "--devices", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == ""


def test_what_does_not_fit_says_so_and_what_would(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--config", config(tmp_path, model="Shallow"), "--budget", "560KiB", "--micro-batches", "1"]
    status, devices = planned(capsys, *arguments)
    assert status == 2
    assert [device["fits"] for device in devices] == [False, True, True, True], (
        "the first one has the optimizer's state"
    )
    assert devices[0]["smallest"] > 560 * 2**10 >= devices[1]["peak"]
    assert main(["plan", *arguments, "--save", str(tmp_path / "p.yaml")]) == 2
    printed = capsys.readouterr()
    assert "a training step, in KiB, predicted" in printed.out
    assert re.search(r" 560\.0 +- +needs \d+\.\d$", printed.out, re.MULTILINE)
    assert "Not all devices can meet their budget: nothing is saved" in printed.err
    assert not (tmp_path / "p.yaml").exists()


def test_many_equal_devices_share_a_row_and_those_without_rows_are_told(tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", "--config", config(tmp_path, model="Shallow", data="FewRows"), "--devices", "12"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +cuda:0 +1 ", printed, re.MULTILINE)
    assert re.search(r"^ *cuda:1 to cuda:9 +1 ", printed, re.MULTILINE)
    assert "2 of 12 devices get no rows of this batch, and idle." in printed


def test_options_of_the_command_line_win_over_the_config(tmp_path: Path, capsys: Any) -> None:
    own = config(
        tmp_path, "{memory_budget: 32MiB}", "Shallow"
    )  # with room: how a plan is found is the business of other tests
    _, devices = planned(capsys, "--config", own, "--devices", "cuda:1,cuda:3", "--budget", "67108864")
    assert [(device["device"], device["budget"]) for device in devices] == [("cuda:1", 2**26), ("cuda:3", 2**26)]
    _, devices = planned(capsys, "--config", own, "--model.init_args.dropout", "0.0")
    assert [device["budget"] for device in devices] == [2**25] * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "lots"], "--budget='lots' is not allowed"),
        (["--budget", "0.6"], "--budget='0.6' is not allowed; give positive bytes, such as 8GiB, or a share"),
        (["--budget", "0%"], "--budget='0%' is not allowed; give more than 0% and at most 100%"),
        (["--devices", "gpus"], "--devices 'gpus' is not allowed; give a number up to 128, or names"),
        (["--devices", "0"], "--devices '0' is not allowed"),
        (["--report", "report.doc"], "--report report.doc is not allowed; name an .html, .png, .svg or .pdf file"),
        (
            ["--report", "nowhere/report.html"],
            "--report nowhere/report.html is not allowed: there is no folder nowhere",
        ),
        (["--save", "nowhere/plan.yaml"], "--save nowhere/plan.yaml is not allowed: there is no folder nowhere"),
        (["--save", "/tmp"], "--save /tmp is not allowed: it is a folder; name a file"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml is not allowed: there is no such file"),
        (["--config", "/tmp"], "--config /tmp is not allowed: it is a folder; name a file in it"),
        (["--planner", "crystal ball"], "invalid choice: 'crystal ball'"),
        (["--model.init_args.nobody", "1"], "nobody"),
        (["--trainer.nobody", "1"], "nobody"),
    ],
)
def test_bad_arguments(options: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", "--config", config(tmp_path), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "model", "data", "said"),
    [
        ("{memory_budget: auto}", "Deep", "Rows", "memory_budget='auto' needs the devices to be there; give --budget"),
        ("{memory_budget: 0.5}", "Deep", "Rows", "memory_budget=0.5 needs the devices"),
        ("{shifts: auto}", "Deep", "Rows", "does not know what shifts would move"),
        ("{}", "NoBackward", "Rows", "the step runs no backward"),
        ("{}", "Deep", "NoRows", "There is no training batch to look at"),
    ],
)
@pytest.mark.filterwarnings("ignore:Total length of")
def test_configs_that_cannot_be_planned(
    strategy: str, model: str, data: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["plan", "--config", config(tmp_path, strategy, model, data)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("strategy", "number"), [("{workload: [3, 1]}", 2), ("{}", 1)])
def test_a_budget_is_a_share_of_what_a_device_would_take(
    strategy: str, number: int, tmp_path: Path, capsys: Any
) -> None:
    own = config(tmp_path, strategy)
    _, whole = planned(capsys, "--config", own, "--devices", str(number))
    _, devices = planned(capsys, "--config", own, "--devices", str(number), "--budget", "60%")
    expected = [int(0.6 * device["peak"]) for device in whole]
    assert expected == sorted(expected, reverse=True)
    assert [device["budget"] for device in devices] == expected
    assert all(device["peak"] <= device["budget"] for device in devices)


def test_neighbors_on_one_device_are_planned_as_the_one_slice_that_they_take(tmp_path: Path, capsys: Any) -> None:
    own = config(tmp_path, "{workload: [1, 2]}", "Shallow")
    for several, single in (("cpu,cpu", "cpu"), ("sim:0,sim:0", "sim:0")):
        arguments = ["--config", own, "--budget", "8MiB"]
        _, found = planned(capsys, *arguments, "--devices", several)
        text = (tmp_path / "config.yaml").read_text().replace("{workload: [1, 2]}", "{}")
        (tmp_path / "one.yaml").write_text(text)
        _, one = planned(capsys, "--config", str(tmp_path / "one.yaml"), "--budget", "8MiB", "--devices", single)
        assert [(each["rows"], each["peak"]) for each in found] == [(1024, one[0]["peak"])]


@pytest.mark.parametrize(
    ("strategy", "devices", "said"),
    [
        ("{}", "sim:0,sim:1,sim:0", "sim:0 is named in two places"),
        ("{execution: inline}", "sim:0,sim:0", "execution='inline' runs replicas beside each other that share"),
    ],
)
def test_replicas_beside_each_other_on_one_device_are_not_predicted(
    strategy: str, devices: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    own = config(tmp_path, strategy, "Shallow")
    assert main(["plan", "--config", own, "--devices", devices]) == 1
    assert said in capsys.readouterr().err


def test_budgets_by_device(tmp_path: Path, capsys: Any) -> None:
    given = "{memory_budget: {cuda:0: 30MiB, cuda:1: 20MiB, cuda:2: 20MiB, cuda:3: 1KiB}}"
    status, devices = planned(capsys, "--config", config(tmp_path, given, "Shallow"))
    assert [device["budget"] for device in devices] == [30 * 2**20, 20 * 2**20, 20 * 2**20, 2**10]
    assert [device["fits"] for device in devices] == [True, True, True, False]
    assert status == (0 if all(device["fits"] for device in devices) else 2)
    assert main(["plan", "--config", config(tmp_path, "{memory_budget: {cuda:0: 3MiB}}")]) == 1
    assert "says nothing of cuda:1, cuda:2, cuda:3; give it a budget" in capsys.readouterr().err


def test_micro_batches_are_planned_shown_and_saved(tmp_path: Path, capsys: Any) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "report.html"
    _, whole = planned(capsys, "--config", config(tmp_path, model="Shallow"))
    own = config(tmp_path, "{micro_batches: 2}", "Shallow")
    _, halves = planned(capsys, "--config", own)
    arguments = ["--config", own, "--devices", "cuda:0", "--micro-batches", "5", "--budget", "8MiB"]
    assert main(["plan", *arguments, "--save", str(plan), "--report", str(page)]) == 0
    for one, half in zip(whole, halves, strict=True):
        assert (one["micro_batches"], one["micro_batch_rows"]) == (1, 256)
        assert (half["micro_batches"], half["micro_batch_rows"], half["values_recomputed"]) == (2, 128, 0)
        assert half["unplanned"] == one["unplanned"]
        activations = [each["peak"] - one["parameters"] - one["gradients"] for each in (one, half)]
        assert activations[1] < 0.8 * activations[0]
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split()[-1] == "micro-batches"
    assert printed.splitlines()[2].split()[-3:] == ["5", "x", "205"]
    line = re.search(r"cuda:0: 5 micro-batches of 205 rows, no values recomputed: .* x, peak .* of 8\.0 MiB", printed)
    assert line is not None
    assert line[0] in page.read_text()
    assert dpx.MemoryPlan.load(plan).micro_batches == 5


def test_the_fastest_number_of_micro_batches_within_a_budget(tmp_path: Path, capsys: Any) -> None:
    own = config(tmp_path, "{micro_batches: auto}", "Shallow")
    options = ["--config", own, "--devices", "cuda:0"]
    status, (plain,) = planned(capsys, *options)
    assert (status, plain["micro_batches"]) == (0, 1), "nothing asks for fewer bytes"
    budget = plain["peak"] - plain["unplanned"] // 2
    status, (found,) = planned(capsys, *options, "--budget", str(budget), "--planner", "threshold")
    assert status == 0
    assert found["peak"] <= budget
    assert found["micro_batches"] > 1 or found["values_recomputed"] > 0
    status, (small,) = planned(capsys, *options, "--budget", str(plain["peak"] - plain["unplanned"] * 19 // 20))
    assert (status, small["micro_batches"] > 1) == (0, True), "no plan of all rows takes so little"


@sim_only
def test_none_are_chosen_where_a_run_would_leave_its_step_in_one_piece(tmp_path: Path, capsys: Any) -> None:
    options = ["--config", config(tmp_path, "{micro_batches: auto}", "Normed"), "--devices", "cuda:0"]
    _, (free,) = planned(capsys, *options)
    budget = str(free["peak"] - free["unplanned"] * 19 // 20)
    with pytest.warns(UserWarning, match=r"in one piece, where .* may need less: net\.0\.4 would normalize by micro-b"):
        status, (found,) = planned(capsys, *options, "--budget", budget)
    assert (status, found["micro_batches"]) == (2, None), "no plan of all rows takes so little"
    status, (named,) = planned(capsys, *options, "--budget", budget, "--micro-batches", "256")
    assert (status, named["micro_batches"]) == (0, 256)


@sim_only
@pytest.mark.parametrize(
    ("strategy", "others", "why"),
    [
        ("{micro_batches: auto, verify: 'off'}", (), "leaves out the rehearsal"),
        ("{micro_batches: auto}", ("--trainer.num_nodes", "2"), "there are several processes"),
        ("{micro_batches: auto}", ("--trainer.deterministic", "true"), "deterministic algorithms are asked for"),
    ],
)
def test_nor_where_the_run_would_choose_none_whatever_the_module(
    strategy: str, others: tuple[str, ...], why: str, tmp_path: Path, capsys: Any
) -> None:
    options = ["--config", config(tmp_path, strategy, "Shallow"), "--devices", "cuda:0", *others]
    try:
        _, (free,) = planned(capsys, *options)
        budget = str(free["peak"] - free["unplanned"] * 19 // 20)
        with pytest.warns(UserWarning, match=why):
            status, (found,) = planned(capsys, *options, "--budget", budget)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (status, found["micro_batches"]) == (2, None), "no plan of all rows takes so little"


def test_the_prediction_of_micro_batches_is_what_a_run_takes(tmp_path: Path, capsys: Any) -> None:
    _, devices = planned(capsys, "--config", config(tmp_path, "{micro_batches: 3, gradient_buckets: 0}"))
    gc.collect()  # what other tests left on the devices
    monitor = dpx.DeviceMemoryMonitor(table=False, every_n_steps=1)
    strategy = dpx.DPXStrategy(micro_batches=3, gradient_buckets=0, execution="inline")
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=4, max_epochs=1, callbacks=[monitor])
    trainer.fit(Deep(), datamodule=Rows())
    for index, device in enumerate(devices):
        taken = max(monitor.last[torch.device("sim", index)].peak_by_phase.values())
        assert device["peak"] - device["gradients"] <= taken * 1.02, index
        assert taken <= device["peak"] * 1.02, index


class Ends(Shallow):
    def training_step_end(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


@pytest.mark.parametrize(
    ("model", "said"), [("ByHand", "the step optimizes by hand"), ("Ends", "needs the outputs of all rows")]
)
def test_steps_that_are_not_cut_are_planned_in_one_piece(model: str, said: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.warns(UserWarning, match=f"micro_batches=3 is planned in one piece: .*{said}"):
        _, devices = planned(capsys, "--config", config(tmp_path, "{micro_batches: 3}", model))
    assert {device["micro_batches"] for device in devices} == {1}


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "many", ""])
def test_what_is_no_number_of_micro_batches(given: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", "--config", config(tmp_path), f"--micro-batches={given}"]) == 1
    assert f"--micro-batches {given} is not allowed; give a positive number" in capsys.readouterr().err


@sim_only
def test_a_config_may_name_the_environment_of_its_processes(tmp_path: Path, capsys: Any) -> None:
    path = Path(config(tmp_path, model="Shallow"))
    environment = "lightning.pytorch.plugins.environments.LightningEnvironment"
    path.write_text(path.read_text().replace("trainer:\n", f"trainer:\n  plugins:\n    - class_path: {environment}\n"))
    status, _ = planned(capsys, "--config", str(path), "--devices", "sim:0")
    assert status == 0
