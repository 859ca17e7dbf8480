"""What a run that never ended has left on a module goes when the next one begins."""

import pytest
import torch
from torch import nn

from lightning_dpx.lightning.leftovers import begin_unshifted, leave, take_over
from lightning_dpx.memory import MemoryPlan, applied_plan, apply_plan
from lightning_dpx.memory.plan.plan import fingerprint_of
from lightning_dpx.replicas import synchronize_batch_norm
from lightning_dpx.shifting import applied_shift, shift_activations
from tests.conftest import SIMULATED


class User:
    """A strategy that notes when it must give up."""

    def __init__(self, *, is_running: bool = False) -> None:
        self.is_running = is_running
        self.gave_up = 0

    def give_up_replicas(self) -> None:
        self.gave_up += 1


def test_the_next_user_takes_over_from_one_that_does_not_run() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    earlier, later = User(), User()
    take_over(module, earlier)
    synchronize_batch_norm(module)
    take_over(module, later)
    assert (earlier.gave_up, later.gave_up) == (1, 0)
    assert type(module[0]) is nn.BatchNorm1d


def test_a_user_that_runs_keeps_what_it_has() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    running = User(is_running=True)
    take_over(module, running)
    synchronize_batch_norm(module)
    take_over(module, User())
    assert running.gave_up == 0
    assert type(module[0]) is not nn.BatchNorm1d


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_the_users_own_shifts_give_way_with_a_warning_that_says_how_to_ask_for_them() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shift_activations(module, ["1"], {"cpu": "sim:1"})
    with pytest.warns(UserWarning, match=r"give DPXStrategy\(shifts=\{'cpu': 'sim:1'\}, shift_activations=\['1'\]\)"):
        begin_unshifted(module, shifts=False, plans=False)
    assert applied_shift(module) is None
    shift_activations(module, ["1"], {"cpu": "sim:1"})
    leave(module, "cpu")
    assert module[1].weight.device == torch.device("cpu")


def test_the_users_own_plan_gives_way_to_the_strategys() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fingerprint = fingerprint_of(module)
    apply_plan(module, MemoryPlan("Sequential", fingerprint, "by hand", None, 1, None, None, None, None, ()))
    begin_unshifted(module, shifts=False, plans=False)
    assert applied_plan(module) is not None
    with pytest.warns(UserWarning, match="followed a memory plan already"):
        begin_unshifted(module, shifts=False, plans=True)
    assert applied_plan(module) is None
