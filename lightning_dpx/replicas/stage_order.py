"""Which stages replicas run one after the other although they have threads, as earlier runs have shown."""

import warnings

from torch import nn

from lightning_dpx.replicas.caller_context import watching_modes
from lightning_dpx.replicas.executor_choice import Lanes
from lightning_dpx.replicas.row_partition import RowPartition
from lightning_dpx.replicas.stage_traits import StageTraits
from lightning_dpx.replicas.stage_watch import StageWatch


class StageOrder:
    """Decides by what a stage was seen to do: draw, write what replicas share, wait for each other.

    Args:
        module: The user's module, whose code the stages run.
        lanes: Where replicas run.
        partition: Who gets which rows.

    Attributes:
        traits: What stages were seen to do.
    """

    def __init__(self, module: nn.Module, lanes: Lanes, partition: RowPartition) -> None:
        self.traits: StageTraits = StageTraits(module)
        self._module = module
        self._lanes = lanes
        self._partition = partition

    def takes_turns(self, stage: str) -> bool:
        """Whether replicas that have threads run this stage one after the other all the same."""
        if not self._lanes.in_threads or self._partition.trains_apart:
            return False
        if watching_modes():
            return True
        return self.traits.needs_order(stage, training=self._module.training)

    def runs_one_by_one(self, stage: str) -> bool:
        """Whether slices run this stage one after the other, in their order."""
        return self.takes_turns(stage) or not self._lanes.in_threads

    def watch(self, stage: str, keep: tuple[object, ...]) -> StageWatch | None:
        """What looks at a stage that takes turns, where that decides whether threads may run it.

        Args:
            stage: Its name.
            keep: Objects that replicas share whatever they hold.
        """
        # A look at all that a language model leads to takes 30 times as long as its step.
        if self.traits.needs_order_for_good(stage, training=self._module.training):
            return None
        return StageWatch(self._module, keep)

    def note_meeting(self, stage: str) -> None:
        """Micro-batches that take turns in the thread of one device cannot wait there for each other."""
        training = self._module.training
        self.traits.met.add(training)
        # In line a replica that waits lets the next one run, in the same thread.
        if self._lanes.in_threads and self._partition.cuts_slices(training=training):
            self._partition.stop_cutting_slices(training=training)
            warnings.warn(
                f"dpx: micro-batches have waited for each other in the {stage} (a collective, or a metric that is "
                "called as a function or computed there), which they cannot do on several devices: slices are run in "
                "one piece from here on. A metric's update() does not wait.",
                stacklevel=3,
            )

    def note_shared_write(self, stage: str) -> None:
        """A stage that writes what all replicas share takes turns from now on, or its slices as one."""
        self.traits.note_write(stage, training=self._module.training)
        # Threads that were chosen for their speed have no turns to take.
        if self._partition.trains_apart:
            self._partition.joins_slices_in_training = True

    def note_writes(self, stage: str, watch: StageWatch | None, *, in_turns: bool, wrote_shared: bool) -> None:
        """What the stage wrote of what its replicas share; ``watch`` has looked at it while it took turns."""
        # The watch sees more than containers: globals, classes, and what steps take back before they end.
        needs_order = False
        if watch is not None:
            needs_order, has_new = watch.compare()
            self.traits.note_new_state(stage, training=self._module.training, has_new=has_new)
        if not needs_order and not wrote_shared:
            return
        if not in_turns:
            ordered = "take their slices as one" if self._partition.trains_apart else "take turns"
            warnings.warn(
                f"The {stage} writes Python state that its replicas share, so they {ordered} from here on; in this "
                "step, which ran in threads, its order may not be that of one device.",
                stacklevel=3,
            )
        self.note_shared_write(stage)

    def note_draws(self, stage: str, *, in_turns: bool, drew: bool) -> None:
        """What the stage drew from generators that its replicas share, or that it drew nothing."""
        # That replicas take turns is said once for all stages. What ran in threads is always said:
        # its numbers were drawn in some order, and not every step can run again.
        known = self.traits.has_drawn
        self.traits.note_draws(stage, training=self._module.training, drew=drew)
        if not drew or (in_turns and known):
            return
        if in_turns:
            text = "its replicas take turns instead of running in threads"
        elif self._partition.trains_apart:
            self._partition.joins_slices_in_training = True
            text = "in threads they draw in no fixed order; from here on they take their slices as one"
        else:
            text = "in threads they draw in no fixed order; from here on they take turns"
        warnings.warn(
            f"The {stage} draws random numbers from a generator that replicas share: {text}.",
            stacklevel=3,
        )
