"""After a step ran out of memory: a plan for less, then more micro-batches, and where neither helps it says so."""

from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem
from tests.conftest import SIMULATED
from tests.lightning.memory.test_out_of_memory import Deep, Hungry, fit

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("devices_as_before"),
    pytest.mark.filterwarnings("ignore:dpx. the activations on sim.0 took"),  # which is what these tests are about
]


def test_a_plan_is_tightened_when_somebody_else_takes_the_room(execution: str) -> None:
    expected = fit(None, 1, "backward", execution)
    options = {"memory_budget": "3900KiB", "neighbor": True}
    with pytest.warns(UserWarning, match=r"ran out of memory .* and is repeated"):
        ours = fit("4000KiB", 1, "backward", execution, on_oom="replan", **options)
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.filterwarnings("ignore:dpx. 2 micro-batches would need less memory, but")  # batch norm
def test_no_plan_helps_where_the_rest_is_too_large() -> None:
    too_large = r"what is there beside activations|cannot be met|Not even 64 of 256 rows fit on sim:0"
    with pytest.raises(dpx.PlanError, match=too_large):
        fit("700KiB", 1, "forward", "inline", on_oom="replan")


class KeepsAll(Planner):
    """Computes nothing again, so that only micro-batches need less."""

    name = "keeps all"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        return Choice()


@pytest.mark.parametrize(
    ("memory", "told"), [("2MiB", "the step needs at least"), ("520KiB", "what is there beside activations")]
)
def test_a_refusal_without_a_budget_names_what_was_given(memory: str, told: str) -> None:
    with pytest.raises(dpx.BudgetError) as error:
        fit(memory, 1, "forward", "inline", on_oom="replan", verify="off", micro_batches=1, planner=KeepsAll())
    text = " ".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "on_oom='replan' allows" in text
    assert told in text
    assert "use a smaller batch" in text
    assert "memory_budget" not in text


class Cut(Deep):
    """Without what depends on how rows are cut: dropout and, unless given, batch norm."""

    def __init__(self, peak_in: str, norm: bool = False) -> None:
        super().__init__(peak_in)
        for part in self.net.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        if not norm:
            self.net[-1] = nn.Identity()


@pytest.mark.parametrize("peak_in", ["forward", "backward"])
def test_where_no_plan_fits_the_step_is_cut_into_more_micro_batches(peak_in: str) -> None:
    def trained(memory: str | None, **options: Any) -> dict[str, torch.Tensor]:
        return fit(memory, 1, peak_in, "inline", kind=Cut, **options)

    expected = trained(None)
    room = {"forward": "2MiB", "backward": "2900KiB"}[peak_in]
    own = {"on_oom": "replan", "planner": KeepsAll()}
    with pytest.warns(UserWarning, match=r"is repeated, 1 of 3 .* on sim:0, [248] micro-batches of \d+ rows"):
        ours = trained(room, **own)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    with pytest.raises(dpx.PlanError):  # a number that was asked for stays
        trained("1MiB", micro_batches=2, **own)


def test_micro_batches_that_are_not_one_device_do_not_mend_a_step(recwarn: Any) -> None:
    with pytest.raises(dpx.PlanError):
        fit("2MiB", 1, "forward", "inline", kind=lambda peak: Cut(peak, True), on_oom="replan", planner=KeepsAll())
    said = [str(one.message) for one in recwarn]
    assert any("2 micro-batches would need less memory, but they are not what one device gives" in one for one in said)


class OverAllRows(Cut):
    """Its loss is computed from the outputs of all slices, so that each has a gradient of its own outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        hidden = Hungry.apply(self.net(rows)) if self.peak_in == "backward" else self.net(rows)
        return {"logits": self.head(hidden), "labels": labels}

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"], outputs["labels"])


@pytest.mark.filterwarnings("ignore:dpx. a step ran out of memory")
def test_a_backward_from_outputs_of_slices_is_not_repeated_on_others() -> None:
    with pytest.raises(dpx.BudgetError):
        fit("1500KiB", 2, "backward", "inline", kind=OverAllRows, on_oom="replan", planner=KeepsAll())
