"""What one run of a rehearsal draws, on each of its replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.lightning.rehearsal.comparison.observation import OUTSIDE_TORCH
from lightning_dpx.replicas import GeneratorStates, StepDraws
from lightning_dpx.replicas.context import ReplicaRank, as_rank, current_rank
from lightning_dpx.replicas.drawn_rows import DrawnRows
from lightning_dpx.replicas.same_draws import SameDraws, SharedParameters
from lightning_dpx.torch_compat import DisableTorchDispatch, DisableTorchFunction


@dataclass(slots=True, eq=False)
class _DrawsApart(ReplicaRank):
    """A replica that draws on after a meeting from where it has been itself; others have drawn since.

    Attributes:
        generators: All that count.
    """

    generators: GeneratorStates

    def exchange(self, kind: str, value: Any, act: Callable[[list[Any]], Any], *, optional: bool) -> Any:
        """Meets the others as any replica, but for the generators."""
        own = self._now()

        def act_and_note(values: list[Any]) -> Any:
            # The last to come has left them where it was.
            _restore(own)
            return act(values), self._now()

        # By name: dataclasses with slots are made twice, and super() finds the class that is gone.
        result, drawn = ReplicaRank.exchange(self, kind, value, act_and_note, optional=optional)
        # What the meeting itself has drawn, a closure's dropout, each has drawn.
        _restore(drawn)
        return result

    def _now(self) -> GeneratorStates:
        # A step may be in the middle of modes, such as that of parts on another device.
        with DisableTorchFunction(), DisableTorchDispatch():
            return self.generators.again()


def _restore(states: GeneratorStates) -> None:
    with DisableTorchFunction(), DisableTorchDispatch():
        states.restore()


def _drawing_apart(rank: ReplicaRank | None, generators: GeneratorStates) -> ReplicaRank | None:
    if rank is None:
        return None
    return _DrawsApart(rank.rank, rank.world_size, rank.rendezvous_slot, generators)


class RunDraws:
    """Lets all steps of a run draw the same numbers, and notes what they draw.

    Args:
        start: The generators as every step of the run finds them.
        sizes: Rows of each slice, where rows of a slice draw each its own; all rows draw alike unless given.
        rows: Where rows lie in what is drawn, as of :class:`SameDraws`.
        parts: As there.

    Attributes:
        start: As given.
        of_steps: What each step has drawn; backwards are no steps.
        left_alone: After the run, the operators and generators whose numbers could not be made equal.
    """

    def __init__(
        self, start: GeneratorStates, sizes: Sequence[int] = (), rows: Sequence[DrawnRows] = (), parts: int = 1
    ) -> None:
        self.start: GeneratorStates = start
        self._sizes = sizes
        self._rows = rows
        self._parts = parts
        self._modes: list[SameDraws] = []
        self._modes_of_steps: list[SameDraws] = []
        self.of_steps: list[StepDraws] = []
        self.left_alone: list[str] = []

    @contextmanager
    def in_step(self, shared: SharedParameters, stage: str) -> Iterator[None]:
        """A replica's own step, or its backward.

        Args:
            shared: What must not be written without a copy.
            stage: A step's name, or "backward".
        """
        mode = SameDraws(shared, self._sizes, self._rows, self._parts)
        self._modes.append(mode)
        if stage == "backward":
            with mode:
                yield
            return
        self._modes_of_steps.append(mode)
        self.start.restore()
        with mode, as_rank(_drawing_apart(current_rank(), self.start)):
            yield
        self.of_steps.append(StepDraws(self.start, self.start.again(), tuple(mode.on_host), tuple(mode.on_devices)))

    def end(self) -> None:
        """The run has ended, and its generators are where it has left them."""
        found: list[str] = []
        for mode in self._modes:
            found += mode.left_alone
        if self.start.again().differs_outside_torch(self.start):
            # No dispatch mode sees those draw, so their states are compared.
            found.append(OUTSIDE_TORCH)
        self.left_alone = list(dict.fromkeys(found))

    @property
    def drew(self) -> bool:
        """Whether anything was drawn."""
        return any(mode.drew for mode in self._modes)

    @property
    def by_step(self) -> list[tuple[int, ...]]:
        """Of each step, how many numbers a row got, draw by draw."""
        return [tuple(mode.draws) for mode in self._modes_of_steps]

    @property
    def shapes_by_step(self) -> list[tuple[tuple[int, ...], ...]]:
        """Of each step, the shapes of the same, draw by draw."""
        return [tuple(mode.shapes) for mode in self._modes_of_steps]

    @property
    def places_by_step(self) -> list[tuple[int, ...]]:
        """Of each step, for how many rows it drew by their places, draw by draw."""
        return [tuple(mode.places) for mode in self._modes_of_steps]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """What the results of all operators are made of."""
        found: set[torch.dtype] = set()
        for mode in self._modes:
            found |= mode.dtypes
        return found
