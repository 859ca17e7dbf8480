"""What an earlier run left on a module because it never reached its teardown.

Lightning skips the teardown of a strategy where a callback fails in ``on_exception`` or a logger in ``finalize``. The
next run, of whatever Trainer, finds shifts, synchronized batch norms, memory plans, methods and idle workers then, and
must neither refuse the module nor train what the other one has made of it.
"""

import weakref
from typing import Protocol

import torch
from torch import nn

from lightning_dpx.lightning.instance_methods import remove_instance_methods
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.memory import applied_plan, remove_plan
from lightning_dpx.replicas import restore_batch_norm
from lightning_dpx.shifting import applied_shift, unshift_activations


class User(Protocol):
    """A strategy, as far as it puts things on modules."""

    @property
    def is_running(self) -> bool:
        """Whether its Trainer is in the middle of a run."""

    def give_up_replicas(self) -> None:
        """Takes everything of it off the module, and ends its workers."""


# Weak on both sides: what was put on a module keeps neither it nor its strategy.
_USERS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[User]]" = weakref.WeakKeyDictionary()


def take_over(module: nn.Module, user: User) -> None:
    """``user`` begins a run with ``module``; what an earlier one left on it goes first."""
    reference = _USERS.get(module)
    earlier = None if reference is None else reference()
    # A run within a run, of the same module: the outer one still needs what it has put there.
    if earlier is not None and earlier is not user and earlier.is_running:
        return
    if earlier is not None:
        earlier.give_up_replicas()
    # Also where the earlier strategy is gone: what it has put on the module is still there.
    take_off(module)
    _USERS[module] = weakref.ref(user)


def take_off(module: nn.Module) -> None:
    """Takes off what only a strategy puts on a module."""
    restore_batch_norm(module)
    remove_instance_methods(module)


def begin_unshifted(module: nn.Module, shifts: bool, plans: bool) -> None:
    """What the user, or a run that nothing remembers, has put on the module gives way to the strategy's own.

    A strategy moves the whole module to its devices, so what was shifted before is shifted no longer.

    Args:
        module: As the run finds it.
        shifts: Whether the strategy shifts parts itself.
        plans: Whether the strategy puts memory plans on itself.
    """
    shift = applied_shift(module)
    if shift is not None:
        unshift_activations(module, "cpu")  # the strategy moves it to its own devices next
        rank_zero_warn(
            f"dpx: the module was shifted already, {shift.entry}, and the strategy moves it as a whole: it runs "
            + (
                "with the strategy's own shifts."
                if shifts
                else f"unshifted. To shift parts of it, give DPXStrategy(shifts={{{str(shift.source)!r}: "
                f"{str(shift.target)!r}}}, shift_activations={shift.chosen})."
            )
        )
    if plans and applied_plan(module) is not None:
        remove_plan(module)
        rank_zero_warn("dpx: the module followed a memory plan already; the strategy's own takes its place.")


def leave(module: nn.Module, device: torch.device | str) -> None:
    """At the end of a run: the shifts go, and what was elsewhere goes to ``device``."""
    take_off(module)
    if applied_shift(module) is not None:
        unshift_activations(module, device)
