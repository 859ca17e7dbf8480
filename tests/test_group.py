import pytest
import torch
from torch import nn

import lightning_dpx as dpx


@pytest.fixture
def group(execution):
    torch.manual_seed(0)
    made = dpx.ReplicaGroup(
        nn.Linear(3, 2), ["cpu"] * 3, workload=[2, 1, 1], inputs_need_grad=True, execution=execution
    )
    yield made
    made.close()


def test_outputs_and_gradients_equal_the_plain_module(group) -> None:
    rows, out_grads = torch.randn(8, 3), torch.randn(8, 2)
    plain, inputs = group.replicas[0].module, rows.clone().requires_grad_()
    plain(inputs).backward(out_grads)
    expected, expected_inputs = plain.weight.grad.clone(), inputs.grad
    group.forward(rows)
    group.backward(out_grads)
    assert group.slices == [slice(0, 4), slice(4, 6), slice(6, 8)]
    assert [len(part) for part in group.outputs()] == [4, 2, 2]
    torch.testing.assert_close(group.outputs_merged(), plain(rows))
    torch.testing.assert_close(plain.weight.grad, expected)
    torch.testing.assert_close(group.input_grads_merged()[0], expected_inputs)


def test_write_replaces_and_add_accumulates() -> None:
    rows = torch.randn(4, 3)
    grads = {}
    for request in ("write", "add"):
        torch.manual_seed(0)
        group = dpx.ReplicaGroup(nn.Linear(3, 1), ["cpu"] * 2, grad_req=request)
        for _ in range(2):
            group.forward(rows)
            group.backward(torch.ones(4, 1))
        grads[request] = group.replicas[0].module.weight.grad
    torch.testing.assert_close(grads["add"], 2 * grads["write"])


def test_fixed_params_get_no_gradient() -> None:
    group = dpx.ReplicaGroup(nn.Linear(3, 1), ["cpu"] * 2, fixed_params=["bias"])
    group.forward(torch.randn(4, 3))
    group.backward(torch.ones(4, 1))
    assert all(replica.module.bias.grad is None for replica in group.replicas)


def test_set_params_reaches_every_replica() -> None:
    group = dpx.ReplicaGroup(nn.Linear(2, 1), ["cpu"] * 2)
    values = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    group.set_params(values, {})
    group.forward(torch.ones(4, 2), is_train=False)
    assert group.outputs_merged().flatten().tolist() == [2, 2, 2, 2]
    assert group.get_params()[0]["weight"].tolist() == [[1, 1]]
    with pytest.raises(dpx.ConfigurationError, match="no 'other'; it has weight, bias"):
        group.set_params({"other": torch.ones(1)}, {})


def test_bad_arguments_are_refused() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(dpx.ConfigurationError, match="devices is empty"):
        dpx.ReplicaGroup(module, [])
    with pytest.raises(dpx.ConfigurationError, match="grad_req='sum'"):
        dpx.ReplicaGroup(module, ["cpu"], grad_req="sum")
    with pytest.raises(dpx.ConfigurationError, match="'offset'; the parameters are: weight, bias"):
        dpx.ReplicaGroup(module, ["cpu"], fixed_params=["offset"])
    group = dpx.ReplicaGroup(module, ["cpu"], grad_req="null")
    with pytest.raises(dpx.ConfigurationError, match="needs a forward"):
        group.backward()
    group.forward(torch.ones(1, 1))
    with pytest.raises(dpx.ConfigurationError, match="grad_req='null'"):
        group.backward()
    with pytest.raises(dpx.ConfigurationError, match="inputs_need_grad=True"):
        group.input_grads()
