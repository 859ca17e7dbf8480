"""Drops everything but the units at the marks where enough has gathered since the last mark.

The rule of MXNet's memory monger: walk the values in the order of forward and add up their bytes; at a stage mark with
more than the threshold since the last kept stage, keep that stage. Marks are the places where few bytes lead on, which
in a chain of blocks are the outputs of the blocks.

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_dpx.memory.plan.choice import Choice

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """A choice with the sizes that guide the search for a better threshold.

    Attributes:
        choice: What to drop.
        save_size: Bytes of the stages that are kept.
        max_size: Bytes of the largest stretch between two of them.
    """

    choice: Choice
    save_size: int
    max_size: int


def make_mirror_plan(problem: "Problem", threshold: int) -> MirrorPlan:
    """The rule for one threshold, in bytes."""
    marks = set(problem.cuts)
    kept = set[int]()
    leading_on = dict[int, int]()  # units that later ones are computed from, and the last of these
    local_size = save_size = max_size = 0
    for index, unit in enumerate(problem.units):
        local_size += unit.num_bytes
        if unit.droppable and problem.last_use[index] > index:
            leading_on[index] = problem.last_use[index]
        if index in marks and local_size > threshold:
            leading_on = {member: last for member, last in leading_on.items() if last > index}
            stage = list(leading_on)
            leading_on.clear()  # each is kept once
            kept.update(stage)
            save_size += sum(problem.units[member].num_bytes for member in stage)
            max_size = max(max_size, local_size)
            local_size = 0
    max_size = max(max_size, local_size)
    return MirrorPlan(Choice(frozenset(problem.droppable) - kept), save_size, max_size)
