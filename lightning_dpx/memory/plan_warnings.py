"""What is told of steps that a plan is not made for: once each, as it would be of every one of them."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.torch_compat import tree_leaves, was_traced
from lightning_dpx.units import format_mib

_MOST_OF_A_FORWARD = 0.5  # of its bytes; what a loss does not depend on waits as well, until it is forgotten


class PlanWarnings:
    """Looks whether steps are the planned one, and need no more than its budget.

    Args:
        module: What follows the plan.
        plan: Which.
        watches: Whether the caller plans for other steps itself, so that nothing is told of them.

    Attributes:
        is_followed: Whether a forward has followed the plan.
    """

    def __init__(self, module: nn.Module, plan: MemoryPlan, *, watches: bool) -> None:
        self._plan = plan
        self._looks_at_forwards = plan.budget is not None and not watches
        self._has_told_of_checkpoint = False
        self._has_told_of_waiting = False
        self._has_told_of_peak = False
        self.is_followed: bool = False
        self._handles: list[Any] = []
        # Whose gradients would take a step beyond the budget; none where that is not so, or is told.
        self._trained: list[weakref.ref[nn.Parameter]] = []
        if (plan.adding_peak or 0) > (plan.budget or plan.adding_peak or 0):
            self._trained = [weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad]

    @property
    def looks_for_gradients(self) -> bool:
        """Whether gradients that a backward finds would take a step beyond the budget."""
        return bool(self._trained)

    @property
    def counts_waiting(self) -> bool:
        """Whether the hooks shall count what earlier forwards have kept for backwards that are to come."""
        return self._looks_at_forwards and not self._has_told_of_waiting

    def look_at_forward(self, values: Rematerialization) -> None:
        """After a forward: tells if its backward will need more than the budget; more is dropped from then on."""
        plan = self._plan
        # Who watches plans for such steps.
        if not self._looks_at_forwards or plan.budget is None:
            return
        self._look_at_waiting(values.waiting, plan.budget)
        if self._has_told_of_peak:
            return
        peak = values.peak_of_other_step()
        if peak > plan.budget:
            self._has_told_of_peak = True
            values.widen()
            warnings.warn(
                f"dpx: a step needs about {format_mib(peak)} or more in its backward, where the plan has a budget of "
                f"{format_mib(plan.budget)}: it is another step than the planned one, or a larger one. From now on all "
                "is dropped that the plan drops in any call like it; where that is too little, make the plan for the "
                "step that needs most.",
                stacklevel=2,
            )

    def _look_at_waiting(self, waiting: float, budget: int) -> None:
        """Tells if forwards before this one, with all that they have kept, wait for their backward."""
        plan = self._plan
        if self._has_told_of_waiting or waiting < _MOST_OF_A_FORWARD or plan.peak is None:
            return
        peak = plan.peak + int(waiting * (plan.saved_bytes or 0))
        if peak > budget:
            self._has_told_of_waiting = True
            warnings.warn(
                f"dpx: a forward of the planned {plan.model} has run before the backward of an earlier one: together "
                f"they need about {format_mib(peak)} or more, where the plan has a budget of {format_mib(budget)} for "
                "one. Make the plan for a module whose forward calls it as often as a step does, or run each backward "
                "before the next forward.",
                stacklevel=2,
            )

    def watch_backward(self, output: Any) -> None:
        """Looks for gradients when the backward of ``output`` begins: they may be set to ``None`` until then."""
        # The first tensor that has a history: its gradient is among the first that come.
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._look_for_gradients)  # type: ignore[no-untyped-call]
                return

    def _look_for_gradients(self, _gradient: Any) -> None:
        """Tells if the backward of a step that was planned as one without gradients finds some."""
        for reference in self._trained:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                break
        else:
            return
        self._trained = []
        plan = self._plan
        warnings.warn(
            f"dpx: parameters have gradients, to which the backward of the planned {plan.model} adds new ones: "
            f"that takes up to {format_mib(plan.adding_peak or 0)}, where the plan has a budget of "
            f"{format_mib(plan.budget or 0)} for a step that finds none. Make the plan with accumulates=True, or "
            "call zero_grad(set_to_none=True) before every step.",
            stacklevel=2,
        )

    def watch_compiled_code(self, module: nn.Module) -> None:
        """Tells if the first gradient comes of code that was compiled around the module before the plan was put on."""
        for parameter in module.parameters():
            # Such code calls the hooks that were there when it was compiled.
            if parameter.requires_grad and was_traced(parameter):
                hook = parameter.register_post_accumulate_grad_hook(self._look_for_forward)  # type: ignore[no-untyped-call]
                self._handles.append(hook)
                return

    def _look_for_forward(self, _parameter: Any) -> None:
        self.remove()
        if self.is_followed:
            return
        warnings.warn(
            f"dpx: a backward has run through the planned {self._plan.model}, and no forward has followed the plan: "
            "code that was compiled around the module before keeps what it did. Compile the module, or parts of it, "
            "and make the plan of that.",
            stacklevel=2,
        )

    def remove(self) -> None:
        """Takes its hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def tell_of_checkpoint(self) -> None:
        """The plan is not followed in a region that makes all of the module again."""
        if self._has_told_of_checkpoint:
            return
        self._has_told_of_checkpoint = True
        warnings.warn(
            f"dpx: a {self._plan.model} with a memory plan runs within torch.utils.checkpoint, which drops all that "
            "the module saves and makes it again at once: the plan is not followed in there. Plan what calls "
            "checkpoint instead, or leave checkpoint out.",
            stacklevel=2,
        )
