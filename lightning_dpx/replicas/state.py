"""Keeps the replicas equal to replica 0: parameters after they changed, buffers after a step, train/eval flags."""

import operator
import warnings
from collections.abc import Sequence

from lightning_dpx.replicas.buffer_sync import BufferMode, BufferSync
from lightning_dpx.replicas.parameter_sync import ParameterSync
from lightning_dpx.replicas.replica import Replica

_IS_TRAINING = operator.attrgetter("training")  # mapped over all submodules in every step, not looped


class StateSync:
    """What replicas get from replica 0 before each of their steps.

    Args:
        replicas: All of them, each with buffers of its own.
        buffers: What replica 0's buffers become after a step.
        check_every: Every so many steps, replicas are compared with replica 0; never if 0.
        primaries: Those with parameters of their own, which micro-batches share; all unless given.

    Attributes:
        parameters: Carries them from replica 0, or their owners, to the others.
        buffers: Carries them there and back.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        buffers: BufferMode = "broadcast",
        check_every: int = 0,
        primaries: Sequence[Replica] = (),
    ) -> None:
        self._root = replicas[0]
        self._others = tuple(replicas[1:])
        self.parameters: ParameterSync = ParameterSync(replicas, primaries or replicas)
        self.buffers: BufferSync = BufferSync(replicas, buffers)
        self._check_every = check_every
        self._num_steps = 0

    def synchronize(self) -> None:
        """Before a forward: parameters, buffers and flags of the replicas become those of replica 0.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        if self._root.module.training:
            # Before anything is copied, which would hide the difference.
            self._check_now_and_then()
        self.parameters.look_for_unseen_writes()
        self.parameters.synchronize()
        modes = list(map(_IS_TRAINING, self._root.modules))
        for replica in self._others:
            if list(map(_IS_TRAINING, replica.modules)) != modes:
                for mode, module in zip(modes, replica.modules, strict=True):
                    module.training = mode
            self.buffers.follow(replica)
        self.buffers.copy()

    def _check_now_and_then(self) -> None:
        """Every so many steps: writes that left no trace, and that no coming step would overwrite."""
        self._num_steps += 1
        if not self._check_every or self._num_steps % self._check_every or self.parameters.changes_known:
            return
        apart = self.parameters.differing()
        if apart:
            self.parameters.mark_changed()
            name, replica = apart[0]
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            warnings.warn(
                f"Parameter {name} on replica {replica}{more} differed from replica 0 without a trace (written through "
                ".data?); all replicas get the values of replica 0, your module.",
                stacklevel=2,
            )
