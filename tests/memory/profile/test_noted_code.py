"""Nodes that compiled code has made are told from those beside it, and its functions have both ends."""

import torch

from lightning_dpx.memory.profile.noted_code import NotedCode
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace


def test_nodes_within_code_are_told_from_those_before_and_after() -> None:
    code = NotedCode(MemoryTrace(torch.device("cpu")))
    weight = torch.ones(2, requires_grad=True)
    before = weight * 2
    assert not code.has_made(before.grad_fn)
    code.enter()
    within = before * 3
    code.leave()
    between = within * 4
    code.begin_function([0, 2])
    assert code.function == 0
    in_function = between * 5
    code.end_function()
    after = in_function * 6
    made = [code.has_made(one.grad_fn) for one in (before, within, between, in_function, after)]
    assert made == [False, True, False, True, False]
    assert code.function == -1
    assert code.around == {0, 2}
    assert len(code.functions) == 1
    begin, end = code.functions[0]
    assert 0 <= begin < end
