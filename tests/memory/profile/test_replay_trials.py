"""Calls are replayed beside all that a step keeps, and one at a time."""

import weakref

import torch
from torch import nn

from lightning_dpx.memory import profile_step
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.replay_trials import TimedReplay, WatchedReplay


class Beside(CostModel):
    """Counts what replays have given that is still there when another one begins."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_replays = 0
        self.num_present = 0
        self._given: list[weakref.ref[torch.Tensor]] = []

    def _begin(self) -> None:
        self.num_replays += 1
        self.num_present += sum(reference() is not None for reference in self._given)
        self._given.clear()

    def watched_replay(self, replay: WholeCallReplay) -> WatchedReplay:
        self._begin()
        found = super().watched_replay(replay)
        self._given += [weakref.ref(tensor) for tensor in found.found if tensor is not None]
        return found

    def timed_replay(self, replay: WholeCallReplay) -> TimedReplay:
        self._begin()
        found = super().timed_replay(replay)
        self._given += [weakref.ref(tensor) for tensor in found.found if tensor is not None]
        return found


def test_what_a_replay_has_given_is_gone_before_the_next_one() -> None:
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    )
    rows = torch.randn(64, 64)
    costs = Beside()
    profile = profile_step(module, lambda: module(rows).square().mean(), torch.device("cpu"), costs=costs)
    assert profile.calls
    assert costs.num_replays > 1
    assert costs.num_present == 0
