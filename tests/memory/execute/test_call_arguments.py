"""What a call is given: noted weakly, given again as it was put together, refused where writes could not be noticed."""

import gc
import weakref
from typing import Any

import pytest
import torch

from lightning_dpx.memory.execute.call_arguments import CallArguments
from lightning_dpx.memory.execute.recipes import NotRecomputable


def test_they_are_put_together_as_they_were() -> None:
    x = torch.ones(3)
    y = torch.ones(2, requires_grad=True)
    arguments = CallArguments((x, {"pair": [x, y]}, 2), {"flag": True})
    assert len(arguments.tensors) == 2  # one of them was given twice
    assert arguments.num_bytes == x.nbytes + y.nbytes
    new = [torch.zeros(3), torch.zeros(2)]
    args, kwargs = arguments.with_tensors(new)
    assert args[0] is args[1]["pair"][0]
    assert args[1]["pair"][1].requires_grad
    assert not args[0].requires_grad
    assert args[2] == 2
    assert kwargs == {"flag": True}


def test_nothing_lives_longer_for_them() -> None:
    x = torch.ones(3)
    arguments = CallArguments((x,), {})
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert arguments.tensors[0].tensor() is None


def test_a_write_is_noticed() -> None:
    x = torch.ones(3)
    arguments = CallArguments((x,), {})
    assert arguments.tensors[0].tensor() is x
    x.add_(1)
    with pytest.raises(NotRecomputable, match="changed in place"):
        arguments.tensors[0].tensor()


@pytest.mark.parametrize(
    ("given", "why"),
    [(torch.eye(3).to_sparse(), "layout torch.sparse_coo"), (object(), "a object, which may change")],
    ids=["sparse", "object"],
)
def test_what_may_change_unseen_is_an_obstacle(given: Any, why: str) -> None:
    arguments = CallArguments((torch.ones(3), given), {})
    assert why in arguments.obstacle
    assert arguments.tensors == []


def test_a_copy_apart_does_not_hold_the_graph() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    arguments = CallArguments((x,), {})
    assert x in arguments
    apart = arguments.apart()
    assert x not in apart
    assert x in arguments
    assert apart.with_tensors([torch.zeros(3)])[0][0].requires_grad
