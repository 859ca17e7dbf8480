import gc
import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from tests.conftest import places

pytestmark = pytest.mark.usefixtures("hardware")


@pytest.fixture
def make_group():
    """Builds groups that are closed after the test."""
    with ExitStack() as groups:
        yield lambda *args, **options: groups.enter_context(dpx.ReplicaGroup(*args, **options))


@pytest.fixture
def group(make_group, execution, hardware):
    torch.manual_seed(0)
    return make_group(nn.Linear(3, 2), places(3), workload=[2, 1, 1], inputs_need_grad=True, execution=execution)


def test_outputs_and_gradients_equal_the_plain_module(group) -> None:
    rows, out_grads = torch.randn(8, 3).to(places(1)[0]), torch.randn(8, 2).to(places(1)[0])
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


def test_write_replaces_and_add_accumulates(make_group) -> None:
    rows = torch.randn(4, 3)
    grads = {}
    for request in ("write", "add"):
        torch.manual_seed(0)
        group = make_group(nn.Linear(3, 1), places(2), grad_req=request)
        for _ in range(2):
            group.forward(rows)
            group.backward(torch.ones(4, 1, device=places(1)[0]))
        grads[request] = group.replicas[0].module.weight.grad
    torch.testing.assert_close(grads["add"], 2 * grads["write"])


def test_fixed_params_get_no_gradient(make_group) -> None:
    group = make_group(nn.Linear(3, 1), places(2), fixed_params=["bias"])
    group.forward(torch.randn(4, 3))
    group.backward(torch.ones(4, 1, device=places(1)[0]))
    assert all(replica.module.bias.grad is None for replica in group.replicas)


def test_set_params_reaches_every_replica(make_group) -> None:
    group = make_group(nn.Linear(2, 1), places(2))
    values = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    group.set_params(values, {})
    group.forward(torch.ones(4, 2), is_train=False)
    assert group.outputs_merged().flatten().tolist() == [2, 2, 2, 2]
    assert group.get_params()[0]["weight"].tolist() == [[1, 1]]
    with pytest.raises(dpx.ConfigurationError, match="no 'other'; it has weight, bias"):
        group.set_params({"other": torch.ones(1)}, {})


def test_bad_arguments_are_refused(make_group) -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(dpx.ConfigurationError, match="devices is empty"):
        dpx.ReplicaGroup(module, [])
    with pytest.raises(dpx.ConfigurationError, match="grad_req='sum'"):
        dpx.ReplicaGroup(module, places(1), grad_req="sum")
    with pytest.raises(dpx.ConfigurationError, match="'offset'; the parameters are: weight, bias"):
        dpx.ReplicaGroup(module, places(1), fixed_params=["offset"])
    group = make_group(module, places(1), grad_req="null")
    with pytest.raises(dpx.ConfigurationError, match="needs a forward"):
        group.backward()
    group.forward(torch.ones(1, 1))
    with pytest.raises(dpx.ConfigurationError, match="grad_req='null'"):
        group.backward()
    with pytest.raises(dpx.ConfigurationError, match="inputs_need_grad=True"):
        group.input_grads()


def test_a_group_that_is_forgotten_ends_its_workers() -> None:
    group = dpx.ReplicaGroup(nn.Linear(1, 1), places(2), execution="threads")
    group.forward(torch.ones(4, 1))
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("dpx-lane")]
    assert len(workers) == 2
    del group
    gc.collect()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)
