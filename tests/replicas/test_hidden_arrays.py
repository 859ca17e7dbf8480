"""NumPy arrays of modules that are kept in lists or dicts are one for all replicas."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.replicas.hidden_arrays import arrays_of, arrays_of_hidden
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer
from tests.lightning.several_replicas import on_replicas

WAYS: dict[str, dict[str, Any]] = {
    "in line": on_replicas(),
    "threads": {"strategy": dpx.DPXStrategy(execution="threads"), "devices": 3, "accelerator": "cpu"},
    "micro-batches": {"strategy": dpx.DPXStrategy(micro_batches=2), "devices": 1, "accelerator": "cpu"},
}


class HoldsArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.offsets = np.zeros(3, dtype=np.float32)
        self.by_name = {"sums": np.zeros(8)}


class KeepsHelper(Classifier):
    """Its helper's offsets are moved between steps; its sums are of rows, one at a time, or of steps."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.helpers = [HoldsArray()]
        self.counts = counts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums = self.helpers[0].by_name["sums"]
        if self.counts == "rows":
            sums += batch[0].double().sum(0).numpy()
        elif self.counts == "steps":
            sums += 1
        return F.cross_entropy(self.net(batch[0]) + torch.from_numpy(self.helpers[0].offsets), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.helpers[0].offsets += 0.1 * np.arange(3)


def seen_of(counts: str, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = KeepsHelper(counts)
    make_trainer(**options).fit(model, make_loader(), make_loader())
    return {**model.state_dict(), "sums": torch.from_numpy(model.helpers[0].by_name["sums"])}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("counts", ["", "rows"])
def test_what_hooks_and_steps_write_is_there_for_all(way: str, counts: str) -> None:
    assert_equal(seen_of(counts, **WAYS[way]), seen_of(counts, devices=1, accelerator="cpu"))


@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_slices_each_add_is_named(way: str) -> None:
    with pytest.warns(UserWarning, match=r"HoldsArray\[0\].arrays\[1\]"):
        seen_of("steps", **WAYS[way])


def test_arrays_are_found_in_modules_of_containers_that_are_no_submodules() -> None:
    outer = nn.Module()
    outer.inner = HoldsArray()
    hidden = HoldsArray()
    hidden.others = ({"again": [HoldsArray()]}, np.array([object()]))
    outer.kept = [hidden, outer.inner, hidden]
    outer.kept.append(outer.kept)
    names = [name for name, _ in arrays_of_hidden(outer)]
    assert names == [f"HoldsArray[{place}].arrays[{number}]" for place in (0, 1) for number in (0, 1)]
    assert len(arrays_of(hidden)) == 2
    assert not list(arrays_of_hidden(outer, lambda value: value is outer.kept))
