"""Functions that lead to a module lead to its copy."""

import functools
import weakref

import torch
from torch import nn

from lightning_dpx.replicas.replicate import replicate

CPU = torch.device("cpu")


def test_functions_and_weak_references_lead_to_the_replicas_own_module() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    calls: list[nn.Module] = []

    def note(*_: object) -> None:
        calls.append(module)

    module[0].register_forward_hook(note)
    module[0].above = weakref.ref(module)
    module[0].cached = functools.lru_cache(lambda: module)
    _, twin = replicate(module, [CPU, CPU])
    twin.module(torch.ones(1, 1))
    assert twin.module[0].above() is twin.module
    assert twin.module[0].cached() is twin.module
    [hook] = twin.module[0]._forward_hooks.values()
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    assert cells["module"].cell_contents is twin.module
    assert calls == [twin.module], "what the closure shares with others stays shared"
