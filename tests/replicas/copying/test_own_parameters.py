"""Parameters of a copy."""

import functools

import torch
from torch import nn

from lightning_dpx.python_objects.module_hooks import is_ours
from lightning_dpx.replicas.copying.own_parameters import like_parameter

CPU = torch.device("cpu")


def test_copies_have_the_hooks_of_the_user_and_not_those_of_this_package() -> None:
    parameter = nn.Parameter(torch.ones(2))
    seen: list[torch.Tensor] = []
    parameter.register_post_accumulate_grad_hook(seen.append)
    parameter.register_post_accumulate_grad_hook(functools.partial(is_ours))
    copied = like_parameter(parameter, torch.zeros(2))
    copied.sum().backward()
    assert seen[0] is copied
    assert len(copied._post_accumulate_grad_hooks) == 1
