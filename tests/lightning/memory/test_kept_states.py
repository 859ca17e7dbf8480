"""What optimizers will keep is found before their first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.lightning.memory.kept_states import times_kept
from lightning_dpx.lightning.memory.static import bytes_of_states
from lightning_dpx.memory import HostAccount


class Unknown(torch.optim.Optimizer):
    """Keeps three tensors for each parameter, which no setting tells."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"moments": [parameter.detach().clone() for _ in range(3)], "steps": 1}


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adafactor, torch.optim.ASGD, torch.optim.Adam, torch.optim.Muon, torch.optim.SGD],
)
def test_it_is_what_is_there_after_it(make: Callable[..., torch.optim.Optimizer]) -> None:
    parameters = [nn.Parameter(torch.ones(600, 500)), nn.Parameter(torch.ones(500, 300))]
    optimizer = make(parameters)
    before = times_kept(optimizer)
    steps(optimizer, parameters)
    tensors = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    kept = sum(one.nbytes for one in tensors if one.dim())
    assert before == pytest.approx(kept / sum(one.nbytes for one in parameters), abs=0.01)


def test_sums_over_rows_do_not_grow_with_a_parameter() -> None:
    """A shadow of hundreds of megabytes has few rows of each parameter, beside which a sum over them is long."""
    parameters = [nn.Parameter(torch.empty(4096, 2048, device="meta")) for _ in range(40)]
    assert times_kept(torch.optim.Adafactor(parameters)) == pytest.approx((4096 + 2048) / (4096 * 2048))


def test_capturable_steps_keep_what_others_do() -> None:
    """The host, where shadows are, has none."""
    parameters = [nn.Parameter(torch.empty(64, 64, device="meta"))]
    assert times_kept(torch.optim.ASGD(parameters, capturable=True)) == 1


def test_one_that_says_which_others_equal_it_is_asked_like_any_other() -> None:
    class Equal(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

    parameters = [nn.Parameter(torch.zeros(10))]
    assert times_kept(Equal(parameters, lr=0.1)) == 0
    assert times_kept(Equal(parameters, lr=0.1, momentum=0.9)) == 1


def test_each_of_several_optimizers_keeps_its_own() -> None:
    first, second = (nn.Parameter(torch.zeros(1000)) for _ in range(2))
    optimizers = [torch.optim.Adam([first]), torch.optim.SGD([second], lr=0.1)]
    assert bytes_of_states([first, second], optimizers) == {first.device: 2 * first.nbytes}


def test_what_none_of_them_has_gets_no_state() -> None:
    first, second = (nn.Parameter(torch.zeros(1000)) for _ in range(2))
    assert bytes_of_states([first, second], [torch.optim.Adam([first])]) == {first.device: 2 * first.nbytes}
    assert bytes_of_states([first], []) == {first.device: 2 * first.nbytes}


def test_on_the_host_what_is_there_counts_in_place_of_a_guess() -> None:
    parameters = [nn.Parameter(torch.zeros(1000))]
    optimizer = Unknown(parameters)
    assert bytes_of_states(parameters, [optimizer]) == {parameters[0].device: 2 * 4000}
    steps(optimizer, parameters)
    assert bytes_of_states(parameters, [optimizer]) == {parameters[0].device: 3 * 4000}


def test_the_momentum_of_sparse_gradients_counts_as_that_of_others() -> None:
    table = nn.Embedding(100, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.arange(3)).sum().backward()
    before = bytes_of_states([table.weight], [optimizer])
    optimizer.step()
    assert optimizer.state[table.weight]["momentum_buffer"].is_sparse, "the premise"
    assert bytes_of_states([table.weight], [optimizer]) == before == {table.weight.device: 1600}


def test_one_that_may_hold_another_counts_no_less_than_was_guessed_for_it() -> None:
    """As one that climbs first, and leaves the momentum to the optimizer inside of it."""
    parameters = [nn.Parameter(torch.zeros(1000))]
    optimizer = Unknown(parameters)
    optimizer.state[parameters[0]] = {"old": torch.zeros(1000)}
    assert bytes_of_states(parameters, [optimizer]) == {parameters[0].device: 2 * 4000}


def test_a_shadow_is_made_once() -> None:
    """It takes memory, for which later steps have no room."""
    parameters = [nn.Parameter(torch.zeros(500, 500))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    times_kept(optimizer)
    account = HostAccount()
    started = account.start()
    assert times_kept(optimizer) == 0
    assert account.stop(started).most < parameters[0].nbytes
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(500))], "momentum": 0.9})
    assert times_kept(optimizer) > 0, "of other parameters"
