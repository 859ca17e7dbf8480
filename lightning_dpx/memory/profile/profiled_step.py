"""The step that is profiled: its forward, as that of a training step, its backward, and what watches them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_dpx.errors import PlanError
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import IsWorth

Run = Callable[[], torch.Tensor | None]
NO_LOSS = "There is nothing to plan: the loss does not depend on any parameter that requires grad."


class FreshForward:
    """A forward that finds no gradients on the parameters, as a training step does after ``zero_grad``."""

    def __init__(self, module: nn.Module, run: Run, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._run = run
        self._context = context

    def __call__(self) -> torch.Tensor | None:
        # Set to None and not to zero, as by default: zeros would be there all through the forward.
        for parameter in self._module.parameters():
            parameter.grad = None
        with self._context():
            result = self._run()
        if result is not None and not result.requires_grad:
            raise PlanError(NO_LOSS)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """The step that is profiled, and what watches it: the arguments of :func:`profile_step`."""

    module: nn.Module
    run: Run
    backward: Callable[[torch.Tensor], None]
    context: Callable[[], AbstractContextManager[Any]]
    costs: CostModel
    accumulates: bool
    counts_gradients: bool
    is_worth: IsWorth | None

    @property
    def forward(self) -> "FreshForward":
        """Its forward, as that of a step after ``zero_grad``."""
        return FreshForward(self.module, self.run, self.context)

    @property
    def by_hand(self) -> bool:
        """Whether the step runs its backwards itself."""
        return not getattr(self.module, "automatic_optimization", True)

    @property
    def finds_gradients(self) -> bool:
        """Whether backward adds to gradients that are there."""
        return self.accumulates or any(parameter.grad is not None for parameter in self.module.parameters())

    def stand_in_for_gradients(self) -> None:
        """Zeros in place of the gradients that backward adds to; elsewhere it leaves its own, as in a first step."""
        # Only their memory counts: the gradients of a profile are forgotten.
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
            elif self.accumulates and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self, look: Callable[[torch.Tensor], None]) -> None:
        """Forward and backward; ``look`` gets what the forward returns, before the backward."""
        result = self.forward()
        if result is not None:
            look(result)
            self.backward(result)
