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
