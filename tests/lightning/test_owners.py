"""Optimizers follow their parameters to other copies of them."""

import torch

from lightning_dpx.lightning.owners import move_optimizers


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
