"""What one run of a rehearsal draws, on each of its replicas."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dpx.replicas import GeneratorStates, StepDraws
from lightning_dpx.replicas.same_draws import SameDraws, SharedParameters


class RunDraws:
    """Lets all steps of a run draw the same numbers, and notes what they draw.

    Args:
        start: The generators as every step of the run finds them.

    Attributes:
        start: As given.
        of_steps: What each step has drawn on the host; backwards are no steps.
        left_alone: After the run, the operators and generators whose numbers could not be made equal.
    """

    def __init__(self, start: GeneratorStates) -> None:
        self.start: GeneratorStates = start
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
        mode = SameDraws(shared)
        self._modes.append(mode)
        if stage == "backward":
            with mode:
                yield
            return
        self._modes_of_steps.append(mode)
        self.start.restore()
        with mode:
            yield
        self.of_steps.append(StepDraws(self.start, self.start.again(), tuple(mode.on_host)))

    def end(self) -> None:
        """The run has ended, and its generators are where it has left them."""
        found: list[str] = []
        for mode in self._modes:
            found += mode.left_alone
        if self.start.again().differs_outside_torch(self.start):
            # No dispatch mode sees those draw, so their states are compared.
            found.append("a generator of Python or NumPy")
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
    def dtypes(self) -> set[torch.dtype]:
        """What the results of all operators are made of."""
        found: set[torch.dtype] = set()
        for mode in self._modes:
            found |= mode.dtypes
        return found
