"""Cases 52 to 62 of the table of faults: arguments, devices, reducers, shifts, budgets and plans."""

import copy
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning import SimAccelerator
from lightning_dpx.pictures import new_figure
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, seeded

on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME, SPARE = "sim:0", "sim:1"


def fit(model: Classifier | None = None, **options: Any) -> Classifier:
    """One short epoch, without validation."""
    model = model or seeded()
    make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **options}).fit(model, make_loader(), make_loader())
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


# ---- 52: names and types ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": 5}, "reducer"),
        ({"reducer": None}, "reducer"),
        ({"reducer": "hierarchicl"}, "Did you mean 'hierarchical'"),
        ({"planner": "optimum"}, "Did you mean 'optimal'"),
        ({"planner": 5}, "planner"),
        ({"plan": 5}, "plan=5"),
        ({"workload": "evne"}, r"workload='evne'.*'even'"),
        ({"workload": 5}, "workload=5"),
        ({"workload": [1.0, 0.0]}, r"workload\[1\]=0"),
        ({"batch_dim": "0"}, "batch_dim='0'"),
        ({"batch_dim": 1.5}, r"batch_dim=1\.5"),
        ({"batch_dim": True}, "batch_dim=True"),
        ({"batch_dim": {"0": "x"}}, "batch_dim.*'x'"),
        ({"batch_dim": {0: 1}}, "batch_dim.*0"),
        ({"execution": 5}, "execution=5"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"gradient_buckets": "8"}, "gradient_buckets='8'"),
        ({"process_group_backend": 5}, "process_group_backend=5"),
        ({"shifts": 5, "shift_activations": ["net"]}, "shifts=5"),
        ({"shifts": {"sim:0": "sim:3"}, "shift_activations": 5}, "shift_activations=5"),
        ({"shifts": {"sim:0": "sim:3"}, "shift_activations": []}, "activations"),
    ],
)
def test_case_52_wrong_names_and_types_are_refused_at_construction_by_argument(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.DPXStrategy(**options)


def test_case_52_an_input_that_the_batch_does_not_have_is_refused() -> None:
    """A batch dim for an input that is not there would be ignored, and the rows cut along another dim."""
    strategy = dpx.DPXStrategy(batch_dim={"5": 1}, execution="inline")
    with pytest.raises(dpx.DPXError, match="'5'"):
        fit(strategy=strategy, devices=2)


@on_sim
def test_case_52_one_part_to_shift_may_be_given_as_a_text() -> None:
    """A text would otherwise be taken for a list of one-letter names."""
    strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:3"}, shift_activations="net")  # type: ignore[arg-type]
    assert_equal(state(fit(strategy=strategy, accelerator="sim", devices=1)), state(fit()))


def test_case_52_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bf17-mixed' is invalid\. Allowed .*'bf16-mixed'"):
        make_trainer(strategy="dpx", devices=2, precision="bf17-mixed")


@pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reducer": "atuo"}, "Unknown reducer 'atuo'; available: auto, .*Did you mean 'auto'"),
        ({"reducer": "ncl"}, "Unknown reducer 'ncl'; available: .*Did you mean 'nccl'"),
        ({"execution": "fast"}, "execution.*'auto', ?'inline', ?'threads'"),
        ({"gradient_buckets": "many"}, "gradient_buckets"),
        ({"timeout": [1]}, "timeout"),
        ({"workload": {"cpu": 1}}, "workload"),
        ({"memory_budgt": "8GiB"}, "memory_budgt"),
    ],
)
def test_case_52_a_yaml_file_is_refused_by_argument(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit"])
    strategy = {"class_path": "lightning_dpx.DPXStrategy", "init_args": arguments}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "devices": 2, "strategy": strategy}}))
    with pytest.raises((SystemExit, ValueError)) as error:
        LightningCLI(
            Classifier, run=False, args=["--config", str(config)], save_config_callback=None, seed_everything_default=0
        )
    told = " ".join(f"{error.value} {capsys.readouterr().err}".split())
    assert re.search(message, told), told


# ---- 53: reducers that are not possible ----


@on_sim
@pytest.mark.parametrize(
    ("reducer", "devices", "message"),
    [
        ("nccl", 3, "got sim:0, sim:1, sim:2; use 'auto'"),
        ("nccl", [0, 0], "got sim:0, sim:0; use 'auto'"),
    ],
)
def test_case_53_a_reducer_that_cannot_be_had_is_refused_at_setup(reducer: str, devices: Any, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=rf"reducer='{reducer}' needs .*{message}"):
        fit(strategy=f"dpx_{reducer}", accelerator="sim", devices=devices)


@on_sim
@pytest.mark.parametrize("reducer", ["collective", "colocate", "hierarchical", "naive"])
@pytest.mark.parametrize("devices", [3, [0, 0], [0, 0, 1], [2, 0, 2]], ids=str)
def test_case_53_all_others_work_with_any_number_of_devices_and_repeated_ones(reducer: str, devices: Any) -> None:
    """Better than refusing."""
    strategy = dpx.DPXStrategy(reducer=reducer, execution="inline")
    assert_equal(state(fit(strategy=strategy, accelerator="sim", devices=devices)), state(fit()))


@on_sim
def test_case_53_what_auto_falls_back_to_is_announced(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        fit(strategy="dpx", accelerator="sim", devices=3)
    assert "gradients of sim:0, sim:1, sim:2 are summed by reducer='collective'" in caplog.text


# ---- 54: devices ----


@on_sim
@pytest.mark.parametrize("reducer", ["auto", "colocate", "hierarchical", "nccl"])
def test_case_54_one_device_is_bit_equal_whatever_the_reducer(reducer: str) -> None:
    ours = fit(strategy=dpx.DPXStrategy(reducer=reducer), devices=1, accelerator="cpu")
    assert_equal(state(ours), state(fit()), bitwise=True)


@on_sim
def test_case_54_an_accelerator_and_the_host_train_together() -> None:
    """Better than refusing."""
    devices = [torch.device("sim", 0), torch.device("cpu")]
    strategy = dpx.DPXStrategy(parallel_devices=devices, accelerator=SimAccelerator(), execution="inline")
    assert_equal(state(fit(strategy=strategy, accelerator="auto", devices="auto")), state(fit()))


@on_sim
@pytest.mark.parametrize("device", ["sim:9", "meta", "mps"])
def test_case_54_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    devices = [torch.device("sim", 0), torch.device(device)]
    strategy = dpx.DPXStrategy(parallel_devices=devices, accelerator=SimAccelerator())
    with pytest.raises((dpx.ConfigurationError, RuntimeError), match=device):
        fit(strategy=strategy, accelerator="auto", devices="auto")


# ---- 55, 56: shifts ----


@on_sim
@pytest.mark.parametrize("target", ["sim:9", "sim:99", "meta"])
def test_case_55_a_target_that_is_not_there_is_refused_by_name(target: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=rf"shifts\['sim:0'\]='{target}' names an unknown device"):
        dpx.shift_activations(seeded().net.to(HOME), "0", {HOME: target})


class Cut(nn.Module):
    """Submodules for the cases; ``act`` and ``drop`` write into what they get."""

    def __init__(self, forward: Callable[["Cut", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.act, self.case = nn.ReLU(inplace=True), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, x)


def written_by_the_part_and_read_after(m: Cut, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    return m.c(m.act(hidden) + hidden)


def written_by_the_part_that_is_ignored(m: Cut, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    m.act(hidden)
    return m.c(hidden)


def written_by_the_part_and_read_by_a_view(m: Cut, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    half = hidden[:, :4]
    return m.c(torch.cat([half, m.act(hidden)[:, 4:]], 1))


def written_by_the_part_and_read_by_the_next(m: Cut, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    return m.c(m.act(hidden)) + m.b(hidden)


def written_in_place_by_a_function_at_home(m: Cut, x: Tensor) -> Tensor:
    hidden = m.b(m.a(x))
    F.relu(hidden, inplace=True)
    return m.c(m.d(hidden))


def multiplied_in_place_at_home(m: Cut, x: Tensor) -> Tensor:
    hidden = same = m.b(m.a(x))
    hidden *= 2
    return m.c(same)


def written_back_through_a_view(m: Cut, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    hidden[:, :4].add_(m.b(hidden.clone())[:, :4])
    return m.c(hidden)


def copied_into(m: Cut, x: Tensor) -> Tensor:
    into = x.new_zeros(len(x), 8)
    into[:, 2:] = m.b(m.a(x))[:, 2:]
    return m.c(into)


def used_in_place_and_forgotten(m: Cut, x: Tensor) -> Tensor:
    return m.c(m.act(m.a(x)))


def views_of_the_part(m: Cut, x: Tensor) -> Tensor:
    left, right = m.b(m.a(x)).chunk(2, dim=1)
    return m.c(torch.cat([right, left.t().t()], 1))


def the_output_of_the_model(m: Cut, x: Tensor) -> Tensor:
    return m.b(m.a(x)).view(-1, 2, 4)


@on_sim
@pytest.mark.parametrize(
    ("forward", "chosen"),
    [
        (written_by_the_part_and_read_after, ["act"]),
        (written_by_the_part_that_is_ignored, ["act"]),
        (written_by_the_part_and_read_by_a_view, ["act"]),
        (written_by_the_part_and_read_by_the_next, ["act", "b"]),
        (written_in_place_by_a_function_at_home, ["b", "d"]),
        (multiplied_in_place_at_home, ["b"]),
        (written_back_through_a_view, ["b"]),
        (copied_into, ["b"]),
        (used_in_place_and_forgotten, ["act"]),
        (views_of_the_part, ["b"]),
        (the_output_of_the_model, ["b"]),
    ],
)
def test_case_56_what_is_written_in_place_viewed_or_returned_is_right_or_refused(
    forward: Callable[[Cut, Tensor], Tensor], chosen: list[str]
) -> None:
    torch.manual_seed(0)
    plain = Cut(forward).to(HOME)
    shifted, x = copy.deepcopy(plain), torch.randn(5, 8).to(HOME)
    dpx.shift_activations(shifted, chosen, {HOME: SPARE})
    try:
        outputs = [module(x) for module in (plain, shifted)]
    except dpx.UnsupportedError as refused:
        assert chosen[0] in str(refused)  # noqa: PT017  either is good
        return
    for output in outputs:
        assert output.device == torch.device(HOME)
        output.pow(2).sum().backward()
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())
    for mine, theirs in zip(shifted.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad.cpu(), theirs.grad.cpu())


# ---- 57, 59, 61, 62: budgets and plans ----


@pytest.fixture
def small_devices() -> Iterator[None]:
    gc.collect()
    dpx.simulate(3, memory="26MiB")
    yield
    gc.collect()
    dpx.simulate(8)


@on_sim
@pytest.mark.usefixtures("small_devices")
@pytest.mark.parametrize("budget", ["27MiB", 2**40])
def test_case_57_more_than_the_device_has_is_refused(budget: Any) -> None:
    """A plan for memory that is not there would promise what ends in an out-of-memory error."""
    with pytest.raises(dpx.DPXError, match=r"memory_budget=.*26\.0 MiB"):
        fit(strategy=dpx.DPXStrategy(memory_budget=budget), accelerator="sim", devices=2)


@on_sim
def test_case_57_a_fraction_of_a_device_without_a_limit_says_so() -> None:
    with pytest.raises(dpx.DPXError, match=r"memory_budget=0\.5.*limit"):
        fit(strategy=dpx.DPXStrategy(memory_budget=0.5), accelerator="sim", devices=2)


@pytest.mark.parametrize("budget", ["80%", {}, "-1GiB", "0GiB", "1.2.3GiB", float("nan"), float("inf")])
def test_case_57_a_budget_in_other_words_is_refused_with_the_allowed_ones(budget: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"memory_budget=.* is not allowed; give .*'8GiB'"):
        dpx.DPXStrategy(memory_budget=budget)


class Deep(Classifier):
    """Wide enough for activations that are worth a plan; counts, prints and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), Counting(), nn.GELU()) for _ in range(8)]
        self.net = nn.Sequential(nn.Linear(8, 128), *blocks, nn.Linear(128, 3))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        self.total += 1
        print("called")  # noqa: T201  the side effect under test
        return x.sigmoid()


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def batch(rows: int = 512) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 8, generator=generator), torch.randint(3, (rows,), generator=generator)


def fit_batches(model: Classifier, *batches: Any, **options: Any) -> dict[str, Tensor]:
    data = torch.utils.data.DataLoader(list(batches), batch_size=None)
    make_trainer(max_epochs=1, limit_val_batches=0, **options).fit(model, data, data)
    return state(model)


def test_case_59_a_plan_for_another_dtype_is_refused(tmp_path: Path) -> None:
    dpx.search_plan(deep(), batch(), budget=0.6).save(tmp_path / "plan.yaml")
    with pytest.raises(dpx.PlanError, match="made for a Deep"):
        fit_batches(deep().double(), batch(), strategy=dpx.DPXStrategy(plan=str(tmp_path / "plan.yaml")), devices=2)


def test_case_59_a_plan_for_another_batch_gives_the_same_bits() -> None:
    plan = dpx.search_plan(deep(), batch(512), budget=0.6)
    # 1,024 rows fit as well, as more of them is computed again.
    for rows in (64, 2048):
        told = pytest.warns(UserWarning, match="it is another step") if rows > 512 else nullcontext()
        with told:
            ours = fit_batches(deep(), batch(rows), strategy=dpx.DPXStrategy(plan=plan), devices=1)
        assert_equal(ours, fit_batches(deep(), batch(rows)), bitwise=True)


@on_sim
@pytest.mark.filterwarnings("ignore:dpx. a step needs about")  # told of the forward, before the peak is there
def test_case_59_a_plan_that_promises_less_than_this_batch_takes_is_reported() -> None:
    """The file's peak is that of another batch size."""
    plan = dpx.search_plan(deep(), batch(512), budget=0.6)
    strategy = dpx.DPXStrategy(plan=plan)
    with pytest.warns(UserWarning, match=r"activations on sim:0 took [\d.]+ MiB where [\d.]+ MiB was predicted"):
        fit_batches(deep(), *[batch(4096)] * 3, strategy=strategy, accelerator="sim", devices=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_case_62_side_effects_of_the_forward_happen_once(devices: int, capsys: Any) -> None:
    def seen(**options: Any) -> tuple[dict[str, Tensor], list[int], int]:
        model = deep()
        weights = fit_batches(model, *[batch()] * 3, **options)
        return weights, model.net[4][2].calls, capsys.readouterr().out.count("called")

    plan = dpx.search_plan(deep(), batch(), budget=0.6)
    assert plan.names("recompute", "recompute each time")
    capsys.readouterr()
    ours = seen(strategy=dpx.DPXStrategy(plan=plan), devices=devices)
    theirs = seen()
    assert_equal(ours[0], theirs[0], bitwise=True)
    assert ours[1:] == theirs[1:]


def test_case_61_a_missing_extra_is_told_with_the_way_to_install_it(monkeypatch: Any) -> None:
    """There is no solver that could be missing or run out of time: planners are plain Python."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(dpx.UnsupportedError, match=r"pip install 'lightning-dpx\[plots\]'"):
        new_figure(1, 1)
