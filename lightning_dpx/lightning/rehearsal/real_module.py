"""What a rehearsal does to the real module, past its shadow: it is put back, and tells that slices would do it too.

A shadow stands in for the module wherever the trainer leads to it. What leads to it by itself (a global, a class, a
callback that has kept it) gives a step the real module, and the same one to every replica.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.lightning.rehearsal.outside_state import Reached
from lightning_dpx.python_objects.hook_state import hooks_of_parameters
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.other_threads import user_code_runs_elsewhere
from lightning_dpx.replicas.parameter_hooks import ParameterHooks
from lightning_dpx.replicas.same_draws import SharedParameters

_MOST_OBJECTS = 5_000  # of the module, and behind its attributes: the nearest ones first


class RealModule:
    """Keeps attributes, buffers and gradients of the real module, and sees whether a run has changed them.

    Args:
        module: The real one.
        parameters: Of all of its replicas, with their names.
        shared: What has put buffers aside before an operator wrote them.

    Attributes:
        has_hooks: Whether parameters have hooks of the user's.
        reached: What runs have changed, by name.
        changed_by_hooks: What hooks of parameters have left otherwise in slices, by name; empty if nothing.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]], shared: SharedParameters
    ) -> None:
        # Shadows have copies of submodules' hooks, but their parameters have these very ones.
        state = ObjectState(
            list(module.modules()),
            follow_code=False,
            copies=True,
            only_own=True,
            most=_MOST_OBJECTS,
            objects=hooks_of_parameters(module),
        )
        self._objects = Reached(state, module)
        self._shared = shared
        self._parameters = parameters
        # Of both kinds, as either may keep what it has seen.
        self.has_hooks: bool = ParameterHooks([one for _, one in parameters]).are_there
        self._after_step: list[Any] | None = None
        self._ends: list[list[Any]] = []  # of the last two runs
        self._is_alone = not user_code_runs_elsewhere()
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.reached: list[str] = []
        self.changed_by_hooks: str = ""

    def put_gradients_aside(self) -> None:
        """From here on every gradient that a parameter has is one that a run has given it."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def forget_copying(self) -> None:
        """A shadow was copied: what the module has changed of itself for that is none of the step's doing.

        What ``torch.fx`` generates makes its code anew when it is pickled, and modules of e3nn copy themselves by that.
        """
        # As in restore: another thread's changes would be lost.
        if self._is_alone and not user_code_runs_elsewhere():
            self._objects.restore()

    def note_step(self) -> None:
        """The step of a run has ended, and its backward is to come: hooks of parameters have done nothing yet."""
        if self.has_hooks:
            self._after_step = self._objects.marks()

    def note_slices(self) -> None:
        """The last run was in slices, and the one before it as one device."""
        # By hand backwards lie inside of the step, so all is compared that both have left.
        if len(self._ends) == 2 and not self.changed_by_hooks:
            self.changed_by_hooks = self._objects.changed_since(*self._ends)

    def restore(self) -> None:
        """All is what it was before the run that has ended, but for gradients, which are put aside.

        What operators have written is put back afterwards, by ``shared``.
        """
        found = list(self._shared.written_buffers)
        for name, parameter in self._parameters:
            # The shadow has parameters of its own, and gradients there are none of these.
            if parameter.grad is not None:
                parameter.grad = None
                found.append(name)
        changed = ""
        # What another thread has written meanwhile cannot be told from it, and would be lost.
        if self._is_alone and not user_code_runs_elsewhere():
            now = self._objects.marks()
            changed = self._objects.difference(now, self._after_step)
            if self.has_hooks:
                self._ends = [*self._ends[-1:], now]
            self._objects.restore(now)
        else:
            self._ends.clear()
        # Hooks of parameters come to what they keep, whichever copy has called them: what they write in a backward is
        # no way of the step's own to the module.
        if changed and (self._after_step is not None or not self.has_hooks):
            found.append(changed)
        self._after_step = None
        self.reached = list(dict.fromkeys([*self.reached, *found]))

    def give_gradients_back(self) -> None:
        """Parameters have the gradients again that they had before the rehearsal."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
