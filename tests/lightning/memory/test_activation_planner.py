"""The callback under strategies of several processes, which shard the module or give each a copy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer
from tests.programs import free_port, start

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What two processes print."""
    port = free_port()
    program = Path(__file__).with_name("sharded_program.py")
    processes = [start(program, rank, port) for rank in range(2)]
    printed = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


def test_a_sharded_module_trains_to_the_same_bits_with_a_plan(found: list[dict[str, Any]]) -> None:
    assert [one["same"] for one in found] == [True, True]


def test_what_a_sharded_step_logs_goes_with_the_profile(found: list[dict[str, Any]]) -> None:
    """A warning told of fake tensors that outlived it, and forbade real steps in the process."""
    assert [one["left"] for one in found] == [[], []]


def test_all_processes_follow_the_plan_of_the_first(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["dropped"] == second["dropped"]
    assert first["peaks"] == second["peaks"]
    assert first["dropped"]
    unplanned, budget = first["peaks"]
    assert budget == unplanned // 2


def test_a_module_that_fsdp_wraps_trains_to_the_same_bits_with_a_plan(found: list[dict[str, Any]]) -> None:
    """With parameters that stay the user's own, with flat ones, in half precision; names are those of before."""
    first, second = (one["wrapped"] for one in found)
    assert first == second
    assert len(first) == 3
    for same, dropped in first:
        assert same
        assert dropped
        assert all(name.startswith("net.") and "wrapped" not in name for name in dropped)


def test_copies_train_to_the_same_bits_with_a_plan_whatever_ddp_is_told(found: list[dict[str, Any]]) -> None:
    """As it is, with a static graph, with parameters that go unused, and with gradients in its buckets."""
    for one in found:
        assert one["copied"] == [[True, True]] * 4


def test_steps_in_which_processes_meet_are_planned_though_one_of_them_is_slow(found: list[dict[str, Any]]) -> None:
    """A loss over the rows of all processes, and tensor-parallel layers: all time the steps equally often."""
    for one in found:
        assert [others[:2] for others in one["others"]] == [[True, True]] * 3
        assert not one["others"][0][2]


def test_tensor_parallel_blocks_are_replayed_by_each_process_as_it_can(found: list[dict[str, Any]]) -> None:
    """Half of what they take is met by no plan that keeps the calls in which processes meet."""
    first, second = (one["others"] for one in found)
    assert first[1][2] == second[1][2] != []
    assert "net.1" in first[2][2]
    assert "net.1" not in second[2][2]


def test_a_process_that_meets_no_budget_is_not_waited_for(found: list[dict[str, Any]]) -> None:
    first, second = (one["not_met"] for one in found)
    assert first == "Another process found no memory plan for its step; its own error says why."
    assert "cannot be met" in second


def test_processes_may_get_batches_in_another_order(found: list[dict[str, Any]]) -> None:
    """A batch that is larger for one of them leads to a plan of all, for which the others wait."""
    assert all(one["in_other_order"] for one in found)


def test_the_budget_holds_for_the_process_with_the_largest_batch(found: list[dict[str, Any]]) -> None:
    """The plan was made for the batch of the first process alone, which has a quarter of the second one's rows."""
    first, second = (one["larger_elsewhere"] for one in found)
    assert first == second
    same, unplanned, peak = first
    assert same
    whole_batch, _ = found[0]["peaks"]
    assert unplanned == whole_batch, "that of 512 rows, which only the second process has"
    assert peak <= 2**20 < unplanned


def test_a_trainer_has_one_planner_whose_budget_counts(tmp_path: Path) -> None:
    trainer = Trainer(
        strategy="auto",
        accelerator="cpu",
        callbacks=[dpx.ActivationPlanner("200MiB"), dpx.ActivationPlanner("100MiB")],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(dpx.ConfigurationError, match="has 2 ActivationPlanner callbacks; give one"):
        trainer.fit(BoringModel())


def test_steps_by_hand_of_a_sharded_module_follow_a_plan_and_get_none(found: list[dict[str, Any]]) -> None:
    """Their optimizers would step while a step is profiled."""
    for one in found:
        assert one["by_hand"]["refused"].startswith(
            "ActivationPlanner was given a budget, and plans steps of a sharded module with automatic optimization only"
        )
        assert one["by_hand"]["same"]


class Unfreezes(LightningModule):
    """The head alone gets gradients in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()).requires_grad_(False)
        self.head = nn.Linear(256, 1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.net(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unplanned(Callback):
    """Notes what each step would take without its plan."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        planner = next(callback for callback in trainer.callbacks if isinstance(callback, dpx.ActivationPlanner))
        self.peaks.append(planner.plan.unplanned_peak)


def test_what_is_unfrozen_during_a_run_is_planned_for_before_its_first_step() -> None:
    data = DataLoader(TensorDataset(torch.randn(64, 32)), 64)
    seen = Unplanned()
    trainer = make_trainer(strategy="auto", max_epochs=2, callbacks=[dpx.ActivationPlanner(budget="1MiB"), seen])
    trainer.fit(Unfreezes(), data)
    frozen, unfrozen = seen.peaks
    assert unfrozen > 2 * frozen


def test_a_refusal_names_what_was_unfrozen_since_the_last_plan() -> None:
    data = DataLoader(TensorDataset(torch.randn(64, 32)), 64)
    trainer = make_trainer(strategy="auto", max_epochs=2, callbacks=[dpx.ActivationPlanner(budget="140KiB")])
    with pytest.raises(dpx.BudgetError) as error:
        trainer.fit(Unfreezes(), data)
    assert "a step that trained less: " in "".join(error.value.__notes__)


class ReturnsLogits(LightningModule):
    """Returns what its loss is made of, or does not."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1024)
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layer(batch[0])
        loss = logits.log_softmax(-1)[:, 0].mean()
        return {"loss": loss, "logits": [logits]} if self.returns else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_a_step_returns_counts_as_lightning_holds_it() -> None:
    """The logits are there beside the gradients of theirs, to the end of the step."""
    peaks = []
    for returns in (False, True):
        planner = dpx.ActivationPlanner(budget="1GiB")
        trainer = make_trainer(strategy="auto", max_epochs=1, callbacks=[planner])
        trainer.fit(ReturnsLogits(returns=returns), DataLoader(TensorDataset(torch.randn(64, 32)), 64))
        assert planner.profile is not None
        peaks.append(planner.profile.peak)
    assert peaks[1] - peaks[0] == pytest.approx(64 * 1024 * 4, rel=0.01)
