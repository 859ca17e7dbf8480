"""A small shadow of an optimizer, whose steps tell what those of the optimizer itself take.

Its settings are the same, and its parameters are parts of the rows: what a step computes are tensors of the shapes of
parameters, so bytes and time grow as these do.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ELEMENTS = 2**18  # of a shadow's parameters, about: what Python objects take does not count beside them


@dataclass(frozen=True, slots=True)
class ShadowOptimizer:
    """An optimizer of the same class and settings that has made its states.

    Attributes:
        optimizer: The shadow.
        scale: By how much the parameters of the optimizer itself are larger.
        parts: Each of the shadow's parameters, and the one of the optimizer itself that it is a part of.
    """

    optimizer: Any
    scale: float
    parts: Sequence[tuple[nn.Parameter, nn.Parameter]]

    @torch.no_grad()
    def step(self) -> None:
        """Steps without the user's global hooks, and without the grad mode that a step sets.

        Raises:
            Exception: whatever it may be, such as of an optimizer that steps with a closure only.
        """
        inspect.unwrap(type(self.optimizer).step)(self.optimizer)


def with_shadow_optimizer(
    optimizer: Any,
    measure: Callable[[ShadowOptimizer], float],
    *,
    elsewhere: bool = False,
    idle: Collection[int] = (),
) -> float | None:
    """What ``measure`` finds on a shadow; ``None`` where there can be none.

    Args:
        optimizer: Of torch; what others do when they are made is not known.
        measure: Is given the shadow after its first step, which has made states.
        elsewhere: Whether the optimizer will be on an accelerator, where torch takes ``foreach=True`` for most; the
            shadow is on the host.
        idle: Ids of parameters that are left out, as they have no gradients.
    """
    # A class of the user's may do anything when it is made.
    if not is_of_torch(optimizer):
        return None
    trained = [parameter for parameter in trained_by(optimizer) if id(parameter) not in idle]
    if not trained:
        return None
    divisor = max(1, sum(parameter.numel() for parameter in trained) // _ELEMENTS)
    groups = []
    parts: list[tuple[nn.Parameter, nn.Parameter]] = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        if elsewhere:
            _set_for_accelerators(options, type(optimizer))
        of_group = [parameter for parameter in group["params"] if parameter.requires_grad and id(parameter) not in idle]
        mine = [(_part_of(parameter, divisor), parameter) for parameter in of_group]
        if mine:
            groups.append({"params": [part for part, _ in mine], **options})
        parts += mine
    scale: float = sum(parameter.nbytes for parameter in trained) / sum(part.nbytes for part, _ in parts)
    try:
        shadow = ShadowOptimizer(type(optimizer)(groups), scale, parts)
        shadow.step()
        return measure(shadow)
    except Exception:  # noqa: BLE001  such as one that takes its step with a closure only
        return None


def _set_for_accelerators(options: dict[str, Any], kind: type[Any]) -> None:
    """What torch chooses where parameters are on an accelerator, as far as it works on the host."""
    rate = options.get("lr")
    is_tensor = isinstance(rate, torch.Tensor)
    takes_foreach = options.get("foreach", False) is None and not options.get("fused")
    # By the rules of torch.optim.optimizer: these compute one parameter after the other.
    alone = options.get("differentiable") or (is_tensor and not options.get("capturable"))
    if takes_foreach and not alone and kind is not torch.optim.Adafactor:
        options["foreach"] = True
    # What a graph of the device's would capture cannot be captured here; the operators are the same.
    if options.get("capturable"):
        options["capturable"] = False
    if isinstance(rate, torch.Tensor):
        options["lr"] = float(rate)


def is_of_torch(optimizer: Any) -> bool:
    """Whether it is one of torch's own, and no class of the user's."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def trained_by(optimizer: Any) -> list[nn.Parameter]:
    """The parameters that an optimizer changes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.requires_grad]


def _part_of(parameter: nn.Parameter, divisor: int) -> nn.Parameter:
    """A parameter of a part of the rows, with a gradient; where there are too few rows, of a part of the columns."""
    shape = []
    for size in parameter.shape:
        # Two at the least: a sum over rows has one, and is to be told from what has all of them.
        few = min(size, max(2, size // divisor))
        divisor = max(1, divisor * few // max(1, size))
        shape.append(few)
    part = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device="cpu"))
    part.grad = torch.ones_like(part)
    return part
