"""Whether a stage of a step uses what its replicas share, so that they must run it one after the other."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.autograd import forward_ad

from lightning_dpx.python_objects.overrides import Overrides
from lightning_dpx.replicas.passing_writes import PassingWrites
from lightning_dpx.replicas.state_fingerprint import StateFingerprint


class StageWatch(AbstractContextManager["StageWatch"]):
    """Looks at one run of a stage, in turns.

    Replicas share their Python state, and the process has one level of forward-mode differentiation: torch (2.13)
    counts it in a global, so that a thread that leaves its level (``torch.func.jvp``) takes away that of another.

    Args:
        module: Whose state is shared.
        keep: Objects that are not looked into.
    """

    def __init__(self, module: nn.Module, keep: tuple[object, ...]) -> None:
        # It looks at everything that the module leads to, so a stage is watched only while it takes turns anyway.
        self._state = StateFingerprint(module, keep)
        self._passing = PassingWrites(module, keep)
        self._overrides = Overrides()
        self._enters_level = False

    def __enter__(self) -> "StageWatch":
        enter: Any = forward_ad.enter_dual_level

        def noted() -> Any:
            self._enters_level = True
            return enter()

        self._overrides.set(forward_ad, "enter_dual_level", noted)
        self._passing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._passing.__exit__()
        self._overrides.put_back()

    def compare(self) -> tuple[bool, bool]:
        """Whether threads would be in each other's way, and whether the module has state that is new."""
        changed, has_new = self._state.compare()
        return changed or self._passing.found or self._enters_level, has_new
