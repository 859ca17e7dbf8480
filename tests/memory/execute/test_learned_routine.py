"""What several forwards have shown is one routine; a forward says itself where it contradicts what was known."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.learned_routine import LearnedRoutine
from lightning_dpx.memory.execute.routine import Entered, Saved
from lightning_dpx.memory.execute.routine_forwards import FollowedForward, SavedSizes

DROPPED = Saved("a:1", "TanhBackward0")
ANOTHER = Saved("a:2", "TanhBackward0")


def forward_with(*events: Any) -> FollowedForward:
    """A forward that is over, in which this was seen."""
    forward = FollowedForward(lambda tensor: tensor, lambda pack: pack, lambda held: held, SavedSizes())
    for event in events:
        forward.events.append(event)
        if isinstance(event, Entered):
            forward.calls[event.path] = event.number + 1
    return forward


def parts() -> dict[str, nn.Module]:
    return {"a": nn.Tanh(), "list": nn.ModuleList([nn.Tanh()]), "list.0": nn.Tanh()}


def joined(learned: LearnedRoutine, forward: FollowedForward, needed: set[str]) -> bool:
    """Whether the forward was found to contradict what was known."""
    learned.join(forward, learned.routine_of(forward, needed))
    return forward.changed


def test_modules_that_were_not_called_are_unseen_but_lists_of_modules_never_are_called() -> None:
    learned = LearnedRoutine(parts())
    routine = learned.routine_of(forward_with(Entered("a", 0), DROPPED), {"a:1"})
    assert routine.unseen == {Entered("list.0", 0)}
    assert routine.stretches == {Entered("a", 0): (DROPPED,)}


def test_what_a_forward_leaves_out_stays_known() -> None:
    learned = LearnedRoutine(parts())
    assert learned.routine is None
    assert not joined(learned, forward_with(Entered("a", 0), DROPPED), {"a:1"})
    assert not joined(learned, forward_with(Entered("list.0", 0)), {"a:1"})
    assert learned.routine is not None
    assert learned.routine.stretches == {Entered("a", 0): (DROPPED,)}
    assert learned.routine.calls == {"a": 1, "list.0": 1}
    assert not learned.routine.unseen, "each was called by one of them"


def test_other_tensors_in_a_known_call_are_a_contradiction_unless_the_routine_is_lost() -> None:
    learned = LearnedRoutine(parts())
    needed = {"a:1", "a:2"}
    assert not joined(learned, forward_with(Entered("a", 0), DROPPED), needed)
    assert joined(learned, forward_with(Entered("a", 0), ANOTHER), needed)
    learned.is_lost = True
    assert not joined(learned, forward_with(Entered("a", 0), DROPPED), needed), "that the step is another is known"
    assert not learned.is_lost
    assert joined(learned, forward_with(Entered("a", 0), ANOTHER), needed), "and only of that one"


def test_a_real_forward_is_learned_call_by_call() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    learned = LearnedRoutine(dict(module.named_children()))
    forward = forward_with()
    forward.start()
    for path, part in module.named_children():
        part.register_forward_pre_hook(lambda _module, _args, path=path: forward.enter(path, 1))
    module(torch.ones(2, 4))
    forward.off()
    routine = learned.routine_of(forward, set())
    assert routine.calls == {"0": 1, "1": 1}
    assert not routine.unseen
