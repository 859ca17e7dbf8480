"""With owners elsewhere, hooks of the user's module find all gradients on it, and what they write reaches the owners.

``reducer="colocate"`` leaves a gradient only where its parameter has its owner. User code that looks for gradients in
``self.parameters()`` must find those of one device: while hooks may look, the user's module holds copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dpx.lightning.lightning_compat import precision_hooks, reset_precision_hooks, set_precision_hooks
from lightning_dpx.lightning.manual.shared_gradients import Mark
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.step import TrainingStep


class RootGradients:
    """Copies of the owners' gradients on the user's own module.

    Args:
        replicas: The first one is the user's module.
        step: Knows the owners.
    """

    def __init__(self, replicas: ReplicaSet, step: TrainingStep) -> None:
        self._replicas = replicas
        self._step = step
        self._shown: list[Mark] = []  # the copies as they were made, or taken ...
        self._of_owners: list[Mark] = []  # ... and what they were made of
        self.follow_replicas()

    def follow_replicas(self) -> None:
        """The owners are those of the replicas that there are now; nothing may be shown while they change."""
        pairs = zip(self._replicas.root.parameters, self._step.owner_parameters, strict=True)
        self._pairs = [(root, owner) for root, owner in pairs if root is not owner]
        # Hooks may write parameters through .data, as the critic of a Wasserstein GAN does, and
        # no version tells.
        self._replicas.state.parameters.unseen.by_hooks = True

    @torch.no_grad()
    def show(self) -> None:
        """The user's module has all gradients."""
        for root, owner in self._pairs:
            _copy_gradient(owner, root)
        self._shown = [Mark.of(root) for root, _ in self._pairs]
        self._of_owners = [Mark.of(owner) for _, owner in self._pairs]

    @torch.no_grad()
    def take(self) -> None:
        """The owners get those that were written since :meth:`show`; what was written on the owners is shown."""
        # There are no marks where nothing is shown, and then nothing is taken.
        for index, (mark, (root, owner)) in enumerate(zip(self._shown, self._pairs, strict=False)):
            if not mark.is_current(root):
                _copy_gradient(root, owner)
            elif not self._of_owners[index].is_current(owner):
                # What works on an optimizer's parameters, as clipping does, writes there.
                _copy_gradient(owner, root)
            else:
                continue
            self._shown[index] = Mark.of(root)
            self._of_owners[index] = Mark.of(owner)

    def hide(self) -> None:
        """Before the next backward, which would add to the copies."""
        self.take()
        # What was never shown is none of these copies.
        for root, _ in self._pairs if self._shown else ():
            root.grad = None
        self._shown = []
        self._of_owners = []

    @contextmanager
    def hooks_shown(self, wrapped: Any) -> Iterator[None]:
        """Round the hooks that ``wrapped``, a precision plugin, calls before a step, and round its clipping."""
        after_closure, configure_clipping, clip_gradients = precision_hooks(wrapped)

        # _after_closure calls the hooks before a step and then _clip_gradients, so the second runs
        # within the first.
        def with_hooks(*args: Any, **kwargs: Any) -> None:
            # Hooks of the backward may have written the copies, which are made anew next.
            self.take()
            self.show()
            after_closure(*args, **kwargs)
            self.take()

        def with_clipping(*args: Any, **kwargs: Any) -> None:
            self.take()
            # Hooks before the step have run by now. Parameters that they wrote reach the owners
            # before these step.
            self._replicas.state.parameters.follow_root()
            self.show()
            configure_clipping(*args, **kwargs)

        # Called by a hook, as self.clip_gradients(optimizer): it clips what the hook has written so
        # far, which must not be taken afterwards, and the hook may look at what it left.
        def with_owners(*args: Any, **kwargs: Any) -> None:
            self.take()
            clip_gradients(*args, **kwargs)
            self.take()

        set_precision_hooks(wrapped, with_hooks, with_clipping, with_owners)
        try:
            yield
        finally:
            reset_precision_hooks(wrapped)


def _copy_gradient(source: torch.Tensor, target: torch.Tensor) -> None:
    """The gradient of ``source``, on the device of ``target``, as the one of that."""
    gradient = source.grad
    target.grad = None if gradient is None else gradient.detach().to(target.device, copy=True)
