from torch import nn

from lightning_dpx.replicas.parameter_hooks import ParameterHooks


def test_whoever_asks_is_told_of_a_hook_that_is_new() -> None:
    layer = nn.Linear(2, 1)
    hooks = ParameterHooks(list(layer.parameters()))
    assert hooks.changed() is None
    handle = layer.bias.register_hook(lambda gradient: gradient)
    assert [hooks.changed(), hooks.changed()] == [1, 1]
    handle.remove()
    assert hooks.changed() is None


def test_only_hooks_that_came_since_count_as_added() -> None:
    layer = nn.Linear(2, 1)
    old = layer.weight.register_hook(lambda gradient: gradient)
    hooks = ParameterHooks(list(layer.parameters()))
    old.remove()
    assert hooks.added() is None
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [hooks.added(), hooks.added()] == [1, 1]
