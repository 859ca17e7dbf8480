"""Inside a step a replica is a rank: what was written for DDP means the same here."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run, seeded

pytestmark = pytest.mark.usefixtures("hardware")


class Meets(Classifier):
    """Every collective once, with answers that one can check."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy, rank = self.trainer.strategy, float(self.global_rank)
        here = batch[0].new_tensor(rank)
        gathered = self.all_gather({"rank": here})["rank"]
        assert gathered.tolist() == [0, 1, 2, 3]
        assert gathered.device == batch[0].device
        assert strategy.reduce(here, reduce_op="sum").item() == 6
        assert strategy.reduce(here).item() == 1.5
        assert strategy.reduce(here, reduce_op="max").item() == 3
        assert strategy.broadcast(f"from {rank:.0f}", src=2) == "from 2"
        assert strategy.reduce_boolean_decision(rank == 1, all=False)
        assert not strategy.reduce_boolean_decision(rank == 1)
        strategy.barrier()
        assert strategy.is_global_zero == self.trainer.is_global_zero == (rank == 0)
        return super().training_step(batch, batch_idx)["loss"]


def test_every_collective_answers_for_the_replicas(execution) -> None:
    loader = make_loader(num_rows=32)
    model = Meets()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution=execution), devices=4)
    trainer.fit(model, loader, loader)
    assert trainer.global_step == 2
    assert model.all_gather(torch.ones(1)).tolist() == [1], "outside a step there is one process"


class Contrastive(Classifier):
    """A loss that compares every row with every other of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        own = F.normalize(self.net(batch[0]), dim=-1)
        everyone = self.all_gather(own, sync_grads=True)
        everyone = everyone.flatten(0, 1) if everyone.dim() == 3 else everyone
        labels = torch.arange(len(own), device=self.device) + self.global_rank * len(own)
        return F.cross_entropy(own @ everyone.t() / 0.1, labels)


def test_a_contrastive_loss_over_gathered_rows_equals_one_device(execution) -> None:
    loader, results = make_loader(num_rows=48), []
    for options in ({}, {"strategy": dpx.DPXStrategy(execution=execution), "devices": 4}):
        torch.manual_seed(0)
        model = Contrastive()
        # In float64: a temperature of 0.1 makes ten times as much of what the order of additions changes.
        make_trainer(precision="64-true", **options).fit(model, loader, loader)
        results.append(dict(model.state_dict()))
    assert_equal(results[1], results[0])


def trained(**options: Any) -> dict[str, torch.Tensor]:
    """Batches of 16, 16, 16 and 11 rows."""
    torch.manual_seed(0)
    model = Contrastive()
    loader = make_loader(num_rows=59)
    make_trainer(precision="64-true", max_epochs=1, **options).fit(model, loader, loader)
    return dict(model.state_dict())


def test_a_batch_that_cannot_be_cut_evenly_stays_whole_where_a_collective_needs_one_shape(execution, caplog) -> None:
    alone = trained()
    with pytest.warns(UserWarning, match=r"gets a batch whole, .* Its slices would have 6, 5 rows, and a collective"):
        ours = trained(strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(ours, alone)
    assert "checked on 6 rows: loss" in caplog.text, "in slices of three rows each"


def test_unequal_slices_that_nothing_checks_are_an_error_that_says_what_to_do(execution) -> None:
    with pytest.raises(
        dpx.CollectiveError, match=r"all_gather got tensors of shapes \(6, 3\), \(5, 3\).*drop_last=True"
    ):
        trained(strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=2)


@pytest.mark.parametrize("batch", [16, 13])
def test_synchronized_batch_norm_equals_batch_norm_of_the_whole_batch(batch, execution) -> None:
    loader, results = make_loader(num_rows=52, batch_size=batch), []
    for options in ({}, {"strategy": dpx.DPXStrategy(execution=execution), "devices": 3, "sync_batchnorm": True}):
        model = seeded(norm=True)
        results.append(run(model, loader, **options))
        assert type(model.net[1]) is nn.BatchNorm1d, "the class comes back"
    rows = {"logged/rows"}
    assert_equal(*[{k: v for k, v in result.items() if k not in rows} for result in reversed(results)])


def test_batch_norm_without_synchronization_differs() -> None:
    one, ours = (run(seeded(norm=True), **options) for options in ({}, {"strategy": inline(), "devices": 3}))
    assert not torch.allclose(one["net.1.running_var"], ours["net.1.running_var"], rtol=1e-4)


def inline() -> dpx.DPXStrategy:
    return dpx.DPXStrategy(verify="off", execution="inline")


class Uneven(Classifier):
    """Replica ``which`` does something else than the others."""

    def __init__(self, which: int, what: str) -> None:
        super().__init__()
        self.which, self.what = which, what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == self.which:
            if self.what == "fails":
                raise LookupError("on purpose")
            if self.what == "calls another":
                self.trainer.strategy.barrier()
            return super().training_step(batch, batch_idx)
        self.all_gather(batch[0].sum())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("ends", dpx.CollectiveError, "which have ended their step"),
        ("calls another", dpx.CollectiveError, "do not agree"),
        ("fails", LookupError, "on purpose"),
    ],
)
def test_a_meeting_that_cannot_be_is_an_error_at_once(which, what, error, message, execution) -> None:
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3)
    with pytest.raises(error, match=message):
        trainer.fit(Uneven(which, what), make_loader(), make_loader())


class SaysItOnce(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.said = [*vars(self).get("said", []), *([batch_idx] if self.say() else [])]
        return super().training_step(batch, batch_idx)

    @rank_zero_only
    def say(self) -> bool:
        self.print("hello")
        return True


def test_rank_zero_guards_and_print_run_once_a_step(execution, capsys) -> None:
    model = SaysItOnce()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3)
    trainer.fit(model, make_loader(num_rows=48), make_loader(num_rows=48))
    assert capsys.readouterr().out.count("hello") == 3
    assert rank_zero_only.rank == 0


def test_two_replicas_of_one_accelerator_refuse_gradients_through_a_collective(hardware, execution) -> None:
    if hardware == "cpu":
        pytest.skip("the host runs the backward of every replica in its own thread")
    group = dpx.ReplicaGroup(Doubled(), ["sim:1", "sim:1"], execution=execution)
    with group, pytest.raises(dpx.CollectiveError, match="sim:1 holds several replicas"):
        group.forward(torch.ones(4, 2))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        from lightning_dpx.replicas import collectives, current_rank

        return collectives.sum_over_replicas(current_rank(), self.linear(rows))
