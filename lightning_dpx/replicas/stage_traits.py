"""What the stages of a step were seen to do that decides how replicas may run them."""

from torch import nn

from lightning_dpx.replicas.draws import DrawWatch


class StageTraits:
    """Which stages draw random numbers or write shared Python state, and whether replicas met in one.

    A stage is known by its name and by the mode of the module, since dropout draws in training alone.

    Args:
        module: The module whose code the stages run.

    Attributes:
        draws: Notices draws from generators that all replicas share.
        met: The modes (training or not) in which micro-batches have waited for each other.
        has_walked_back: Whether a backward of every replica for itself has ended.
    """

    def __init__(self, module: nn.Module) -> None:
        self.draws: DrawWatch = DrawWatch(module)
        self.met: set[bool] = set()
        self.has_walked_back = False
        self._drew: dict[tuple[str, bool], bool] = {}
        self._wrote: set[tuple[str, bool]] = set()
        self._made_state: dict[tuple[str, bool], bool] = {}  # whether a second step is still to be seen

    @property
    def has_drawn(self) -> bool:
        """Whether any stage has drawn."""
        return any(self._drew.values())

    def needs_order(self, stage: str, *, training: bool) -> bool:
        """Whether replicas must run the stage one after the other to give what one device gives.

        Threads would draw from one generator, of the host or of a device that they share, in any order, and activation
        checkpointing in one thread would reset it under another's feet. So a stage needs order until it was seen to
        draw nothing.
        """
        if self.needs_order_for_good(stage, training=training) or self._made_state.get((stage, training), False):
            return True
        return (stage, training) not in self._drew

    def needs_order_for_good(self, stage: str, *, training: bool) -> bool:
        """Whether nothing that the stage does from here on would let it run in threads."""
        # In threads a shared list would have its items in any order.
        if (stage, training) in self._wrote:
            return True
        # One stage that draws is enough: the backward may recompute what the forward has drawn.
        return any(drew for (_, mode), drew in self._drew.items() if mode == training)

    def note_draws(self, stage: str, *, training: bool, drew: bool) -> None:
        """The stage has run, and drew or did not."""
        key = stage, training
        self._drew[key] = drew or self._drew.get(key, False)

    def note_new_state(self, stage: str, *, training: bool, has_new: bool) -> None:
        """The stage took its turns, and made containers or did not: whether it writes them, the next step shows."""
        # Once: a stage that makes new ones in every step shares none of them.
        self._made_state[stage, training] = has_new and (stage, training) not in self._made_state

    def note_write(self, stage: str, *, training: bool) -> None:
        """The stage wrote Python state that replicas share: a list that threads append to has any order."""
        self._wrote.add((stage, training))
