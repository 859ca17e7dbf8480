"""What torch keeps for each thread is that of the caller wherever a task runs."""

import torch

from lightning_dpx.replicas.executor import Task

CPU = torch.device("cpu")


def test_the_callers_context_reaches_the_workers(executor) -> None:
    def look():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert executor.run([Task(0, CPU, "forward", look)]) == [(True, False, False)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert executor.run([Task(0, CPU, "forward", look)]) == [(False, False, True)]
    with torch.inference_mode():
        assert executor.run([Task(0, CPU, "forward", look)]) == [(False, True, False)]


def test_saved_tensor_hooks_reach_the_workers(executor) -> None:
    packed = []
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        executor.run([Task(0, CPU, "forward", lambda: (weight * weight).sum())])
    assert packed
