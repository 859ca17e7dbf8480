"""Under a mode of ours, code makes tensors of its own classes as it does without one."""

from typing import Any

import pytest
import torch

from lightning_dpx.torch_compat import TorchDispatchMode


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Plain(torch.Tensor):
    """A class with the constructor of torch."""


class Labeled(torch.Tensor):
    """A class that says in words of its own what is in its columns."""

    labels: tuple[str, ...]

    @staticmethod
    def __new__(cls, values: Any, *_: Any) -> "Labeled":
        return super().__new__(cls, values)

    def __init__(self, values: Any, labels: tuple[str, ...]) -> None:
        self.labels = labels


def test_a_subclass_of_a_tensor_shares_its_memory_and_history() -> None:
    given = torch.randn(3, requires_grad=True)
    with Watch():
        made = Labeled(given, ("a",))
        made.sum().backward()
    assert type(made) is Labeled
    assert made.labels == ("a",)
    assert made.data_ptr() == given.data_ptr()
    assert torch.equal(given.grad, torch.ones(3))


@pytest.mark.parametrize("given", [[1.0, 2.0], torch.tensor([1.0, 2.0])], ids=["numbers", "tensor"])
def test_a_subclass_has_the_values_that_it_has_without(given: Any) -> None:
    expected = Plain(given)
    with Watch():
        made = Plain(given)
        again = Plain(made)
    assert type(again) is type(made) is Plain
    assert torch.equal(made, expected)
    assert torch.equal(again, expected)


def test_the_class_of_all_tensors_is_the_same_after_nested_modes_and_errors() -> None:
    before = torch.Tensor.__new__
    with pytest.raises(ValueError, match="of a step"), Watch(), Watch():  # noqa: PT012
        assert torch.Tensor([1.0]).item() == 1
        raise ValueError("of a step")
    assert torch.Tensor.__new__ is before
    assert "__new__" not in vars(torch.Tensor)
