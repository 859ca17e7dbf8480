import copy
import gc
import threading

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from tests.conftest import places
from tests.group.models import TwoHeads

pytestmark = pytest.mark.usefixtures("hardware")


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


def test_a_second_backward_of_micro_batches_replaces_gradients_of_inputs(make_group) -> None:
    module = nn.Linear(3, 2)
    group = make_group(module, places(2), micro_batches=2, inputs_need_grad=True)
    group.forward(torch.ones(8, 3, device=module.weight.device))
    for _ in range(2):
        group.backward(torch.ones(8, 2, device=module.weight.device))
        torch.testing.assert_close(group.input_grads_merged()[0], module.weight.detach().sum(0).expand(8, 3))


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
    for _ in range(2):  # the first forward runs in turns, to see whether it draws random numbers
        group.forward(torch.ones(4, 1))
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("dpx-lane")]
    assert len(workers) == 2
    del group
    gc.collect()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)


def test_a_request_per_parameter(make_group) -> None:
    rows, ones = torch.randn(4, 3), torch.ones(4, 1, device=places(1)[0])
    group = make_group(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), places(2), grad_req={"0.bias": "null", "1.bias": "add"}
    )
    root = group.replicas[0].module
    for _ in range(3):
        group.forward(rows)
        group.backward(ones)
    assert root[0].bias.grad is None
    assert root[1].bias.grad.item() == 12
    once = root[1].weight.grad.clone()
    group.forward(rows)
    group.backward(ones)
    assert torch.equal(root[1].weight.grad, once)
    with pytest.raises(dpx.ConfigurationError, match=r"names '2\.bias'; the parameters are"):
        make_group(nn.Linear(1, 1), places(1), grad_req={"2.bias": "add"})
    with pytest.raises(dpx.ConfigurationError, match=r"grad_req\['bias'\]='sum'"):
        make_group(nn.Linear(1, 1), places(1), grad_req={"bias": "sum"})


def test_nested_inputs_and_outputs(make_group) -> None:
    torch.manual_seed(0)
    plain, pixels, device = TwoHeads().eval(), torch.randn(6, 3), places(1)[0]
    group = make_group(copy.deepcopy(plain), places(2), inputs_need_grad=True)
    group.forward({"pixels": pixels.to(device)})
    out_grads = {"left": torch.randn(6, 2), "right": torch.randn(6, 1)}
    group.backward({name: grad.to(device) for name, grad in out_grads.items()})
    whole = pixels.clone().requires_grad_()
    outputs = plain({"pixels": whole})
    torch.autograd.backward(list(outputs.values()), list(out_grads.values()))
    torch.testing.assert_close(group.outputs_merged()["left"].cpu(), outputs["left"])
    torch.testing.assert_close(group.input_grads_merged()[0]["pixels"].cpu(), whole.grad)
    torch.testing.assert_close(group.replicas[0].module.right.weight.grad.cpu(), plain.right.weight.grad)


def test_reshape_tells_the_new_slices(make_group) -> None:
    group = make_group(nn.Linear(3, 1), places(4), workload=[2, 1, 1, 0.5])
    group.forward(torch.randn(90, 3))
    group.reshape(9)
    assert group.slices == [slice(0, 4), slice(4, 6), slice(6, 8), slice(8, 9)]
    group.forward(torch.randn(9, 3))
    assert [len(part) for part in group.outputs()] == [4, 2, 2, 1]
    with pytest.raises(dpx.ConfigurationError, match="num_rows=0"):
        group.reshape(0)


class Bucket(nn.Module):
    """A language model for sequences of one length, with tied embeddings."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.zeros(length, 64))

    def forward(self, tokens):
        return self.head(self.embed(tokens) + self.positions)


def test_buckets_share_parameters_gradients_and_memory(make_group, hardware) -> None:
    device = places(1)[0]
    longest = make_group(Bucket(16), places(3), grad_req="add")
    sim = torch.get_device_module("sim") if hardware == "sim" else None
    gc.collect()  # what other tests have left goes now, not in between
    before = [sim.memory_allocated(index) for index in range(3)] if sim else []
    with pytest.raises(dpx.ConfigurationError, match="positions has shape"):
        make_group(Bucket(8), places(3), shared_group=longest)
    same = make_group(Bucket(16), places(3), grad_req="add", shared_group=longest)
    if sim:
        assert [sim.memory_allocated(index) for index in range(3)] == before
    for mine, theirs in zip(same.replicas, longest.replicas, strict=True):
        assert mine.module.head.weight is mine.module.embed.weight is theirs.module.embed.weight
    tokens = torch.randint(100, (6, 16)).to(device)
    ones = torch.ones(6, 16, 100, device=device)
    longest.forward(tokens)
    longest.backward(ones)
    once = longest.replicas[0].module.embed.weight.grad.clone()
    same.forward(tokens)
    same.backward(ones)
    torch.testing.assert_close(longest.replicas[0].module.embed.weight.grad, 2 * once)
    with torch.no_grad():
        longest.replicas[0].module.embed.weight.zero_()
    same.forward(tokens)
    assert not same.outputs_merged().any()
    with pytest.raises(dpx.ConfigurationError, match="both need the same devices"):
        make_group(Bucket(16), places(2), shared_group=longest)


def test_a_monitor_sees_every_tensor_of_every_replica(make_group, execution) -> None:
    group = make_group(TwoHeads(), places(2), execution=execution)
    monitor = dpx.TensorMonitor(torch.amax, pattern="left")
    group.install_monitor(monitor)
    group.forward({"pixels": torch.randn(6, 3)})
    seen = monitor.collect()
    assert [(entry.replica, entry.name) for entry in seen] == [(0, "left"), (1, "left")]
    for entry, part in zip(seen, group.outputs(), strict=True):
        assert entry.device == part["left"].device
        assert entry.value == part["left"].max().item()
    assert monitor.collect() == []
    everything = dpx.TensorMonitor()
    group.install_monitor(everything)
    group.forward({"pixels": torch.randn(6, 3)})
    assert [entry.name for entry in everything.collect()] == ["norm", "left", "right", "", ""] * 2
    group.install_monitor(None)
    group.forward({"pixels": torch.randn(6, 3)})
    assert everything.collect() == []
    with pytest.raises(dpx.ConfigurationError, match="is not a function"):
        dpx.TensorMonitor(statistic="mean")


def test_get_params_averages_the_buffers_and_set_params_reaches_all(make_group) -> None:
    torch.manual_seed(0)
    group = make_group(TwoHeads(), places(2))
    pixels = torch.randn(8, 3)
    group.forward({"pixels": pixels})
    parameters, buffers = group.get_params()
    halves = torch.stack([pixels[:4].mean(0), pixels[4:].mean(0)]) * 0.1
    torch.testing.assert_close(buffers["norm.running_mean"], halves.mean(0))
    assert buffers["norm.num_batches_tracked"] == 1
    assert all(value.device.type == "cpu" for value in (*parameters.values(), *buffers.values()))
    other = make_group(TwoHeads(), places(3))
    other.set_params({**parameters, "extra": torch.ones(1)}, buffers, allow_extra=True)
    other.forward({"pixels": pixels.to(places(1)[0])}, is_train=False)
    plain = TwoHeads().eval()
    plain.load_state_dict({**parameters, **buffers})
    torch.testing.assert_close(other.outputs_merged()["left"].cpu(), plain({"pixels": pixels})["left"].detach())


def test_fixed_parameters_cost_no_gradient_memory(make_group, hardware) -> None:
    if hardware != "sim":
        pytest.skip("bytes are counted on simulated devices")
    sim = torch.get_device_module("sim")
    group = make_group(nn.Linear(256, 256, bias=False), places(2), fixed_params=["weight"], inputs_need_grad=True)
    before = [sim.memory_allocated(index) for index in range(2)]
    group.forward(torch.randn(2, 256))
    group.backward(torch.ones(2, 256))
    assert all(sim.memory_allocated(index) - size < 256 * 256 for index, size in enumerate(before))


def test_parameters_with_a_wrong_name_among_them_change_nothing() -> None:
    group = dpx.ReplicaGroup(nn.Linear(4, 2), ["cpu", "cpu"], execution="inline")
    before, _ = group.get_params()
    with pytest.raises(dpx.ConfigurationError, match="The module has no 'weights'; it has weight, bias"):
        group.set_params({"bias": torch.ones(2), "weights": torch.ones(2, 4)}, {})
    torch.testing.assert_close(group.get_params()[0], before)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.save_for_backward(rows)
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        if (ctx.saved_tensors[0] > 100).any():
            raise ValueError("too large")
        return grad


class Fails(nn.Linear):
    """Fails in forward on rows above 200, in backward on rows above 100."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (input > 200).any():
            raise ValueError("much too large")
        return super().forward(FailingBackward.apply(input))


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("both", [False, True])
def test_a_failed_backward_leaves_nothing_in_the_next_one(make_group, request_, both) -> None:
    device = places(1)[0]
    group = make_group(Fails(3, 2), places(3), grad_req=request_, inputs_need_grad=True)
    weight, ones = group.replicas[0].module.weight, torch.ones(6, 2, device=device)

    def step(rows):
        if both:
            group.forward_backward(rows, out_grads=ones)
            return
        group.forward(rows)
        group.backward(ones)

    rows = torch.randn(6, 3)
    step(rows.to(device))
    once = weight.grad.clone()
    failing = torch.cat([rows[:5], torch.full((1, 3), 101.0)])
    with pytest.raises(ValueError, match="too large"):
        step(failing.to(device))
    # Of gradients that replace each other none is left, and those that add up are as they were.
    assert weight.grad is None if request_ == "write" else torch.equal(weight.grad, once)
    step(rows.to(device))
    torch.testing.assert_close(weight.grad, once if request_ == "write" else 2 * once)


def test_after_a_failed_forward_there_is_nothing_to_go_back_from(make_group) -> None:
    device = places(1)[0]
    group, rows = make_group(Fails(3, 2), places(2)), torch.randn(4, 3)
    group.forward(rows.to(device))
    with pytest.raises(ValueError, match="much too large"):
        group.forward(torch.full((6, 3), 201.0, device=device))
    assert group.outputs() == []
    with pytest.raises(dpx.ConfigurationError, match=r"backward\(\) needs a forward\(\)"):
        group.backward(torch.ones(4, 2, device=device))


def test_a_backward_without_a_graph_is_told(make_group) -> None:
    device = places(1)[0]
    group = make_group(nn.Linear(3, 2), places(2))
    with torch.no_grad():
        group.forward(torch.ones(4, 3, device=device))
    with pytest.raises(dpx.ConfigurationError, match=r"found nothing to compute gradients of.*no_grad"):
        group.backward(torch.ones(4, 2, device=device))


class LossAndScores(nn.Linear):
    def forward(self, input, *, target):
        scores = super().forward(input)
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


def test_a_loss_beside_outputs_with_rows(make_group) -> None:
    torch.manual_seed(0)
    device, rows, target = places(1)[0], torch.randn(7, 3), torch.randint(2, (7,))
    plain = LossAndScores(3, 2)
    group = make_group(copy.deepcopy(plain), places(2), workload=[5, 2])
    out_grads = {"scores": torch.randn(7, 2), "loss": torch.tensor(3.0)}  # not in the order of the outputs
    group.forward(rows.to(device), target=target.to(device))
    group.backward({name: grad.to(device) for name, grad in out_grads.items()})
    outputs = plain(rows, target=target)
    torch.autograd.backward([outputs["loss"], outputs["scores"]], [out_grads["loss"], out_grads["scores"]])
    torch.testing.assert_close(group.replicas[0].module.weight.grad.cpu(), plain.weight.grad)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_is_train_is_for_one_forward(make_group, micro_batches) -> None:
    device = places(1)[0]
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.5))
    module[1].eval()
    group = make_group(module, places(2), micro_batches=micro_batches, inputs_need_grad=True)
    ones = torch.ones(8, 3, device=device)
    group.forward(ones, is_train=False)
    outputs = group.outputs_merged()
    assert [part.training for part in module] == [True, False, True]
    group.backward(ones)
    # Also where backward runs the forward once more.
    torch.testing.assert_close(group.input_grads_merged()[0], module[0].weight.sum(0).expand(8, 3))
    group.forward(ones)
    assert (group.outputs_merged() == 0).any()
    assert not (outputs == 0).any()


def test_what_one_group_holds_fixed_another_trains(make_group) -> None:
    device, rows = places(1)[0], torch.randn(4, 3)
    training = make_group(nn.Linear(3, 2), places(2))
    watching = make_group(nn.Linear(3, 2), places(2), shared_group=training, grad_req="null")
    half = make_group(nn.Linear(3, 2), places(2), shared_group=training, fixed_params=["weight"])
    module, ones = training.replicas[0].module, torch.ones(4, 2, device=device)
    training.forward(rows.to(device))
    watching.forward(rows.to(device))
    assert not any(part.requires_grad for part in watching.outputs())
    training.backward(ones)
    torch.testing.assert_close(module.weight.grad.cpu(), rows.sum(0).expand(2, 3))
    module.zero_grad()
    half.forward(rows.to(device))
    half.backward(ones)
    assert module.weight.grad is None
    assert module.bias.grad.tolist() == [4, 4]
    with pytest.raises(dpx.ConfigurationError, match=r"fixed_params='weight' is not allowed; give a list"):
        make_group(nn.Linear(3, 2), places(1), fixed_params="weight")


class Counting(nn.Module):
    """Rows of one length, with a mask and a size of its own."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", torch.ones(length))
        self.register_buffer("length", torch.tensor(length), persistent=False)

    def forward(self, input):
        return self.norm((input * self.mask).sum(1, keepdim=True)) / self.length


def test_buckets_share_running_statistics(make_group) -> None:
    device = places(1)[0]
    long = make_group(Counting(6), places(2))
    short = make_group(Counting(3), places(2), shared_group=long)
    long.forward(torch.randn(8, 6, device=device))
    (left, right) = (group.replicas[0].module for group in (long, short))
    assert torch.equal(left.norm.running_var, right.norm.running_var)
    short.forward(torch.randn(8, 3, device=device))
    assert left.norm.num_batches_tracked == right.norm.num_batches_tracked == 2
    # What another group has written since is all that there is: replicas of this one have older values.
    assert torch.equal(long.get_params()[1]["norm.running_mean"], left.norm.running_mean.cpu())
    assert right.length == 3
    assert len(right.mask) == 3
    with pytest.raises(dpx.ConfigurationError, match=r"Parameter norm\.weight .*torch\.float64 here, .*torch\.float32"):
        make_group(Counting(6).double(), places(2), shared_group=long)
    with pytest.raises(dpx.ConfigurationError, match="shared_group=Counting is not allowed; give a ReplicaGroup"):
        make_group(Counting(6), places(2), shared_group=left)


def test_set_params_writes_all_or_nothing_under_all_names(make_group) -> None:
    module = Bucket(4)
    group = make_group(module, places(2))
    before = copy.deepcopy(module.state_dict())
    positions = torch.ones(4, 64)
    for wrong, told in (
        ({"head.weight": torch.ones(1)}, r"'head\.weight' has shape \(1,\), the module's has \(100, 64\)"),
        ({"embed.weight": [1.0]}, r"'embed\.weight' is list; give a tensor"),
    ):
        with pytest.raises(dpx.ConfigurationError, match=told):
            group.set_params({"positions": positions, **wrong}, {})
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
    group.set_params({name: value + 1 for name, value in before.items()}, {})
    assert torch.equal(module.head.weight, before["embed.weight"] + 1)


def test_get_params_returns_what_was_set(make_group) -> None:
    device = places(1)[0]
    group = make_group(nn.BatchNorm1d(3), places(3))
    group.forward(torch.randn(9, 3, device=device))
    group.set_params({}, {"running_mean": torch.full((3,), 5.0)})
    assert group.get_params()[1]["running_mean"].tolist() == [5, 5, 5]
    group.forward(torch.randn(9, 3, device=device))
    group.forward(torch.ones(2, 3, device=device))  # the first replica's alone
    mean = group.replicas[0].module.running_mean
    torch.testing.assert_close(group.get_params()[1]["running_mean"], mean.cpu())


def test_a_forward_without_inputs_says_so() -> None:
    with dpx.ReplicaGroup(nn.Linear(2, 2), ["cpu", "cpu"]) as group, pytest.raises(dpx.SliceError, match="no inputs"):
        group.forward()


@pytest.mark.parametrize("num_rows", [2.5, True, "6", None])
def test_rows_are_counted_in_ints(make_group, num_rows) -> None:
    group = make_group(nn.Linear(3, 2), places(2))
    with pytest.raises(dpx.ConfigurationError, match=r"num_rows=.* is not allowed; give at least one row, as an int"):
        group.reshape(num_rows)
    with pytest.raises(dpx.ConfigurationError, match=r"batch_dim=.* is not allowed; give an int"):
        make_group(nn.Linear(3, 2), places(2), batch_dim="rows")


def test_a_shifted_module_is_refused(make_group, hardware) -> None:
    if hardware != "sim":
        pytest.skip("a shift needs two devices")
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to("sim:0")
    dpx.shift_activations(net, "1", {"sim:0": "sim:1"})
    with pytest.raises(dpx.ConfigurationError, match=r"is shifted, shifts\['sim:0'\]='sim:1', and a replica of"):
        make_group(net, ["sim:0", "sim:1"])
    assert net[1].weight.device.index == 1
    dpx.unshift_activations(net)
    group = make_group(net, ["sim:0", "sim:1"])
    dpx.shift_activations(group.replicas[1].module, "1", {"sim:1": "sim:2"})
    with pytest.raises(dpx.ConfigurationError, match=r"is shifted, shifts\['sim:1'\]='sim:2'"):
        group.forward(torch.ones(4, 3))


def test_a_module_that_was_moved_is_told(make_group) -> None:
    group = make_group(nn.Linear(3, 2), places(2))
    group.replicas[0].module.to("meta")
    with pytest.raises(dpx.ConfigurationError, match=r"The module lives on meta.*, and the group was made with it on"):
        group.forward(torch.ones(4, 3))


def test_monitors_are_functions_that_give_one_number(make_group) -> None:
    group = make_group(nn.Linear(3, 2), places(2))
    with pytest.raises(dpx.ConfigurationError, match="monitor=3 is not allowed; give a function"):
        group.install_monitor(3)
    group.install_monitor(dpx.TensorMonitor(lambda tensor: tensor.sum(0)))
    with pytest.raises(dpx.ConfigurationError, match=r"returned a tensor of shape \[2\] for ''; return one number"):
        group.forward(torch.ones(4, 3, device=places(1)[0]))


def cast(module: nn.Sequential) -> None:
    module.float()


def exchange_a_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)


def exchange_values(module: nn.Sequential) -> None:
    """As what evaluates with averages of the weights does; nothing counts such a write."""
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def exchange_memory(module: nn.Sequential) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def parametrize(module: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(module[0])
    with torch.no_grad():
        module[0].parametrizations.weight.original0.mul_(2)


def append(module: nn.Sequential) -> None:
    module.append(nn.Linear(2, 2, device=module[0].weight.device, dtype=torch.float64))
    nn.init.ones_(module[2].weight)


def hook(module: nn.Sequential) -> None:
    module[0].register_forward_hook(lambda module, inputs, output: output * 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    "change", [cast, exchange_a_parameter, exchange_values, exchange_memory, parametrize, append, hook]
)
def test_replicas_follow_what_the_module_becomes(make_group, change, num_replicas, micro_batches) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    group = make_group(module, places(num_replicas), micro_batches=micro_batches)
    seen = []
    group.install_monitor(lambda replica, name, tensor: seen.append((replica, name)))
    rows = torch.randn(8, 3, dtype=torch.float64)
    group.forward(rows)
    num_seen = len(set(seen))
    change(module)
    group.install_monitor(None)
    rows = rows.to(module[0].weight)
    expected = module(rows)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    group.install_monitor(lambda replica, name, tensor: seen.append((replica, name)))
    for _ in range(2):
        seen.clear()
        group.forward(rows)
        torch.testing.assert_close(group.outputs_merged(), expected)
    group.backward(torch.ones_like(expected))
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert len(set(seen)) >= num_seen, "the monitor sees all replicas"


def test_what_is_fixed_stays_so_in_a_module_that_has_grown(make_group) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    group = make_group(module, places(2), grad_req={"0.weight": "null"}, fixed_params=["0.bias"])
    module.insert(0, nn.Linear(3, 3, device=module[0].weight.device))
    module[0], module[1] = module[1], nn.Linear(2, 2, device=module[0].weight.device)
    group.forward(torch.randn(4, 3))
    group.backward(torch.ones(4, 2, device=places(1)[0]))
    assert [name for name, parameter in module.named_parameters() if parameter.grad is not None] == [
        "1.weight",
        "1.bias",
    ]
