"""``memory_budget`` by device: what it may be, and what it allows."""

from typing import Any

import pytest
import torch
import yaml

import lightning_dpx as dpx
from lightning_dpx.cli import main
from lightning_dpx.lightning.memory.budgets import Budgets, parse_budget
from tests.conftest import SIMULATED, assert_equal, sim_device
from tests.lightning.memory.test_planning import MIB, fit, loader, tower

on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
SIM0, SIM1, SIM4 = map(sim_device, (0, 1, 4))

# The tower counts what every replica sees.
pytestmark = pytest.mark.filterwarnings("ignore:dpx. .*_step on .* is not what it is on one device.*self.seen")


def test_texts_become_bytes_and_the_rest_stays() -> None:
    given = {"cuda:0": "8GiB", "cuda:1": 0.5, "cuda:2": "auto", "cuda:3": 1000}
    assert parse_budget(given) == {"cuda:0": 8 * 2**30, "cuda:1": 0.5, "cuda:2": "auto", "cuda:3": 1000}
    assert dpx.DPXStrategy(memory_budget=given).memory_budget == parse_budget(given)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({}, r"memory_budget=\{\} is not allowed; give \{device: budget\}"),
        ({"gpu0": "8GiB"}, "memory_budget names 'gpu0', which is no device"),
        ({7.5: "8GiB"}, "memory_budget names 7.5, which is no device"),
        ({"cuda:0": None}, r"memory_budget\['cuda:0'\]=None is not allowed"),
        ({"cuda:0": "much"}, r"memory_budget\['cuda:0'\]='much' is not allowed; give positive bytes"),
        ({"cuda:0": 1.5}, r"memory_budget\['cuda:0'\]=1.5 is not allowed; give positive bytes, .* a fraction"),
        (
            "50%",
            "'50%' is not allowed; give positive bytes, a text such as '8GiB', a fraction of the device as a number",
        ),
        (0, "memory_budget=0 is not allowed; give .* or 'auto'"),
        ({"cuda:0": {"cuda:1": 5}}, r"memory_budget\['cuda:0'\]=\{'cuda:1': 5\} is not allowed"),
    ],
)
def test_what_is_no_budget_is_refused_by_name(budget: Any, said: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=said):
        dpx.DPXStrategy(memory_budget=budget)


@on_sim
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"sim:0": "5MiB"}, "says nothing of sim:1, where replicas live"),
        ({"sim:0": "5MiB", "sim:1": "5MiB", "sim:3": "0.25MiB"}, "names sim:3, but the run is on sim:0, sim:1"),
        ({"sim:0": "5MiB", "sim:1": "0.25MiB"}, r"memory_budget\['sim:1'\]='0.25MiB' allows 256.00 KiB on sim:1"),
    ],
)  # fmt: skip
def test_devices_that_are_not_there_or_missing(budget: Any, said: str) -> None:
    with pytest.raises(dpx.DPXError, match=said):
        fit(tower(), strategy=dpx.DPXStrategy(memory_budget=budget), accelerator="sim", devices=2)


def test_errors_quote_the_budget_as_it_was_written_and_offer_what_one_device_can_do() -> None:
    with pytest.raises(dpx.BudgetError, match=r"memory_budget='0.25MiB' allows 256.00 KiB on cpu") as caught:
        fit(tower(), strategy=dpx.DPXStrategy(memory_budget="0.25MiB"))
    assert "reduction" not in str(caught.value)
    assert "Allow more, or shift parts of the model to another device" in str(caught.value)


def test_one_device_by_two_names() -> None:
    with pytest.raises(dpx.ConfigurationError, match="names cpu twice"):
        fit(tower(), strategy=dpx.DPXStrategy(memory_budget={"cpu": "5MiB", "cpu:0": "5MiB"}))


def test_the_host_by_name(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        ours = fit(tower(), strategy=dpx.DPXStrategy(memory_budget={"cpu": "4.5MiB"}), devices=2)
    assert_equal(ours, fit(tower(), strategy="dpx", devices=2), bitwise=True)
    assert any("predicted of 4.5 MiB allowed" in record.message for record in caplog.records)


def test_every_device_keeps_to_its_own(sim: Any) -> None:
    for device in range(2):
        sim.reset_peak_memory_stats(device)
    plans: dict[torch.device, Any] = {}
    limits: list[list[int]] = []
    strategy = dpx.DPXStrategy(memory_budget={"sim:0": "5MiB", "sim:1": "2.5MiB"})

    class Peek(type(tower())):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            plans.update({device: plan for device, (plan, _) in strategy.memory_plans.items()})
            limits.append([strategy.planned_activations(device)[1] for device in (SIM0, SIM1)])

    torch.manual_seed(0)
    ours = fit(Peek(dropout=0.0), strategy=strategy, accelerator="sim", devices=2)
    assert_equal(ours, fit(tower(dropout=0.0), strategy="dpx", accelerator="sim", devices=2), bitwise=True)
    assert len(plans[SIM1].dropped) > len(plans[SIM0].dropped)
    assert limits[0] == [5 * MIB, 2.5 * MIB]


def test_targets_of_shifts_are_named_too(sim: Any) -> None:
    shifts = {"shifts": {"sim:0": "sim:4"}, "shift_activations": ["net.[3-6]"]}
    for device in (0, 4):
        sim.reset_peak_memory_stats(device)
    both = {"sim:0": "2.5MiB", "sim:4": "2MiB"}
    fit(tower(dropout=0.0), strategy=dpx.DPXStrategy(memory_budget=both, **shifts), accelerator="sim")
    assert sim.max_memory_allocated(0) <= 2.5 * MIB
    assert sim.max_memory_allocated(4) <= 2 * MIB
    strategy = dpx.DPXStrategy(memory_budget={"sim:0": "2.5MiB"}, **shifts)
    with pytest.raises(dpx.ConfigurationError, match="says nothing of sim:4, where parts of the module are shifted to"):
        fit(tower(dropout=0.0), loader(), strategy=strategy, accelerator="sim")


def test_limits(sim: Any) -> None:
    dpx.simulate(8, memory="16MiB")
    budgets = Budgets({"sim:0": 0.5, "sim:1": "auto", "sim:4": "16.25MiB"})
    budgets.place([SIM0, SIM1], [SIM4, torch.device("cpu")])
    assert budgets.limit(SIM0, [SIM0, SIM1]) == 8 * MIB
    assert budgets.limit(SIM1, [SIM0, SIM1]) == pytest.approx(0.95 * 16 * MIB, rel=0.1)
    with pytest.raises(dpx.ConfigurationError, match=r"memory_budget\['sim:4'\]='16.25MiB' is more than sim:4 has"):
        budgets.limit(SIM4, [SIM0, SIM1])
    assert budgets.limit(torch.device("cpu"), [SIM0, SIM1]) > 0, "the host gives what it has, unless it is named"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_a_config_names_devices(capsys: Any) -> None:
    given = "{cuda:0: 8GiB, cuda:1: 0.5}"
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", "examples/digits.yaml", "--trainer.strategy.memory_budget", given, "--print_config"])
    assert not stopped.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["strategy"]["init_args"]["memory_budget"] == {"cuda:0": "8GiB", "cuda:1": 0.5}
