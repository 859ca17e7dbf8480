"""What is taken for a communication hook, and what a hook sees of a bucket; what hooks do is in ``test_processes``."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import lightning_dpx as dpx
from lightning_dpx.reducers.communication_hooks import NAMED_HOOKS, HookBucket, make_communication_hook


def test_names_states_and_hooks_are_understood() -> None:
    assert make_communication_hook("bf16").hook is bf16_compress_hook
    state = PowerSGDState(process_group=None)
    assert make_communication_hook(state).state is state
    assert make_communication_hook(state).hook is powerSGD_hook
    assert make_communication_hook(allreduce_hook).state is None
    assert make_communication_hook((None, allreduce_hook)).hook is allreduce_hook


def test_a_run_has_a_state_of_its_own() -> None:
    assert make_communication_hook("powersgd").state is not make_communication_hook("powersgd").state


@pytest.mark.parametrize("given", ["int8", 3, (1, 2), ("bf16",), {"hook": "bf16"}])
def test_anything_else_is_refused_with_what_there_is(given: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"communication_hook=.* is not allowed") as caught:
        dpx.DPXStrategy(communication_hook=given)
    assert all(repr(name) in str(caught.value) for name in NAMED_HOOKS)


def test_a_bucket_shows_gradients_in_the_shapes_of_their_parameters() -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(4)]
    bucket = HookBucket(index=1, buffer=torch.arange(10.0), parameters=parameters, is_last=True)
    assert (bucket.index(), bucket.is_last()) == (1, True)
    assert [tuple(gradient.shape) for gradient in bucket.gradients()] == [(2, 3), (4,)]
    assert bucket.parameters() == parameters
    bucket.gradients()[1].zero_()
    assert bucket.buffer()[6:].tolist() == [0.0] * 4, "a hook may write its result into them"
    bucket.set_buffer(torch.ones(10))
    assert bucket.gradients()[0].sum() == 6


def test_what_a_hook_returns_is_waited_for() -> None:
    def hook(state: list[int], bucket: HookBucket) -> torch.futures.Future[list[torch.Tensor]]:
        state.append(bucket.index())
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([bucket.buffer() * 2])  # as a collective's own future holds it
        return future

    seen: list[int] = []
    bucket = HookBucket(index=3, buffer=torch.ones(4), parameters=[torch.zeros(4)], is_last=True)
    wait = make_communication_hook((seen, hook)).start(bucket)
    assert wait().tolist() == [2.0] * 4
    assert seen == [3]
