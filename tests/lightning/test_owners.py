"""Optimizers follow their parameters to other copies of them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import lightning_dpx as dpx
from lightning_dpx.lightning.owners import move_optimizers
from tests.conftest import Classifier, StepsByHand, assert_equal, make_loader, make_trainer, run, seeded


def test_groups_and_state_go_to_the_other_copies_and_counters_stay_on_the_host() -> None:
    mine, theirs, stays = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 5.0, 9.0))
    optimizer = torch.optim.Adam([{"params": [mine]}, {"params": [stays], "lr": 0.5}], lr=0.1)
    (mine.sum() + stays.sum()).backward()
    optimizer.step()
    momentum = optimizer.state[mine]["exp_avg"].clone()
    move_optimizers([optimizer], {mine: theirs})
    assert [group["params"] for group in optimizer.param_groups] == [[theirs], [stays]]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert set(optimizer.state) == {theirs, stays}
    assert torch.equal(optimizer.state[theirs]["exp_avg"], momentum)
    assert optimizer.state[theirs]["step"].device == torch.device("cpu")
    theirs.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[theirs]["step"] == 2


class FollowsInStep(Classifier):
    """A slow copy of the network follows it within the step, as the key encoder of MoCo does."""

    leaves_a_trace = False

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 3).requires_grad_(False)
        self.fast = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for mine, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                if self.leaves_a_trace:
                    slow.mul_(0.9).add_(mine, alpha=0.1)
                else:
                    slow.data = slow.data * 0.9 + mine.data * 0.1
        return F.cross_entropy(self.fast(batch[0]) + self.slow(batch[0]) + self.net(batch[0]), batch[1])


class FollowsInStepByHand(StepsByHand, FollowsInStep):
    pass


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("leaves_a_trace", [False, True])
@pytest.mark.parametrize(("kind", "window"), [(FollowsInStep, 1), (FollowsInStep, 2), (FollowsInStepByHand, 1)])
@pytest.mark.filterwarnings("ignore:dpx. training_step gets all of its batches whole")
def test_parameters_that_a_step_with_the_whole_batch_writes_reach_the_owners(
    kind: type[FollowsInStep], window: int, leaves_a_trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FollowsInStep, "leaves_a_trace", leaves_a_trace)

    def trained(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return run(kind(), make_loader(21), accumulate_grad_batches=window, **options)

    assert_equal(trained(strategy=dpx.DPXStrategy("colocate", execution="inline"), devices=3), trained())


class Normalizes(Callback):
    """Weight norm keeps the memory of the weight, which the optimizer steps once more by what it has accumulated."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0:
            for index in (0, 2):
                weight_norm(pl_module.net[index])


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("window", [1, 2])
def test_weights_that_are_parametrized_in_the_middle_of_a_window_are_those_of_one_device(
    optimizer: str, window: int
) -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        model = seeded(optimizer=optimizer)
        return run(model, make_loader(32, 8), accumulate_grad_batches=window, callbacks=[Normalizes()], **options)

    assert_equal(trained(strategy=dpx.DPXStrategy("colocate", execution="inline"), devices=3), trained())


class KeepsItsOptimizer(Classifier):
    """Its optimizer outlasts a run, as that of a module that is given one, and goes on in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


@pytest.mark.parametrize("then", ["replicas", "one device"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_an_optimizer_that_outlasts_a_run_changes_the_module_in_the_next_one(
    sim: Any, num_replicas: int, then: str
) -> None:
    """It kept the parameters of replicas that were gone, and in the next run the module's own stayed as they were."""

    def fitted_twice(first: Any, second: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = KeepsItsOptimizer()
        for options in (first, second):
            loader = make_loader(32, 8)
            make_trainer(max_epochs=2, **options()).fit(model, loader, loader)
            held = [parameter for group in model.optimizer.param_groups for parameter in group["params"]]
            assert all(mine is theirs for mine, theirs in zip(held, model.parameters(), strict=True))
            assert set(model.optimizer.state) == set(held)
        return {name: value.clone() for name, value in model.state_dict().items()}

    def on_replicas() -> dict[str, Any]:
        strategy = dpx.DPXStrategy(reducer="colocate")
        return {"strategy": strategy, "devices": num_replicas, "accelerator": "sim"}

    second = on_replicas if then == "replicas" else dict
    assert_equal(fitted_twice(on_replicas, second), fitted_twice(dict, dict))


class Deep(Classifier):
    """Most of what a device holds are states of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        unused = sum(parameter.sum() for parameter in self.more.parameters())
        return {**outputs, "loss": outputs["loss"] + 0.0 * unused}


class EndOfTraining(Callback):
    def on_train_end(self, *_: Any) -> None:
        torch.sim.reset_peak_memory_stats(0)  # type: ignore[attr-defined]
        self.held = torch.sim.memory_allocated(0)  # type: ignore[attr-defined]


def test_at_the_end_of_a_run_states_need_no_room_on_the_first_device(sim: Any) -> None:
    """All states came together there, and a run that had trained well ended out of memory."""
    end = EndOfTraining()
    strategy = dpx.DPXStrategy(reducer="colocate", execution="inline", verify="off")
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=4, max_epochs=1, callbacks=[end])
    trainer.fit(Deep(), make_loader(), make_loader())
    assert sim.max_memory_allocated(0) <= end.held
