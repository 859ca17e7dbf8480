import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.replicas import OutputDims, OutputGradients, join_input_gradients

CPU = torch.device("cpu")


def _walked(output, out_grads, rows, num_rows=6, dim=0):
    leaves = [leaf for leaf in output.values() if leaf is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    OutputGradients.read(out_grads, num_rows, OutputDims.read(dim)).walk(output, rows)
    return {name: None if leaf is None else leaf.grad for name, leaf in output.items()}


def test_what_has_rows_is_cut_and_what_was_averaged_counts_by_its_rows() -> None:
    scores, scale = torch.arange(6.0), torch.tensor(3.0)
    grads = _walked(
        {"loss": torch.ones(()), "scores": torch.ones(2, 1)}, {"scores": scores, "loss": scale}, slice(1, 3)
    )
    assert grads["scores"].tolist() == [[1], [2]]
    assert grads["loss"] == 3 * 2 / 6
    # As outputs are joined: along the batch dim, or else along the first.
    timed = torch.arange(12.0).view(2, 6)
    grads = _walked(
        {"timed": torch.ones(2, 4), "last": torch.ones(4)}, {"timed": timed, "last": scores}, slice(2, 6), dim=1
    )
    assert torch.equal(grads["timed"], timed[:, 2:])
    assert torch.equal(grads["last"], scores[2:])


def test_an_output_may_go_without_a_gradient() -> None:
    grads = _walked({"a": torch.ones(3), "b": torch.ones(3), "c": None}, {"a": None, "b": torch.ones(6)}, slice(0, 3))
    assert grads["a"] is None
    assert grads["b"].tolist() == [1, 1, 1]


def test_outputs_that_are_no_tensors_have_none_for_their_gradients() -> None:
    # As transformers return them: a cache that was not asked for is None.
    scores = torch.ones(3, requires_grad=True)
    output = {"scores": scores, "cache": None, "name": "last"}
    out_grads = {"scores": torch.ones(6), "cache": None, "name": None}
    assert OutputGradients.read(out_grads, 6, OutputDims.read(0)).walk(output, slice(0, 3))
    assert scores.grad is not None


@pytest.mark.parametrize(
    "wrong", [{"b": torch.ones(6, 2, 3)}, {"a": torch.ones(6, 3, 2)}, {"a": torch.ones(6, 6)}, {}, None]
)
def test_gradients_of_other_outputs_or_shapes_are_refused(wrong) -> None:
    gradients = OutputGradients.read(wrong, 6, OutputDims.read(0))
    with pytest.raises(dpx.SliceError, match=r"The outputs have shapes a: \[2, 2, 3\], and their gradients"):
        gradients.check({"a": torch.ones(2, 2, 3, requires_grad=True)}, slice(0, 2))


def test_gradients_of_other_rows_are_refused_before_anything_runs() -> None:
    with pytest.raises(dpx.SliceError, match="out_grads has 5 rows, the outputs have 6"):
        OutputGradients.read([torch.ones(5, 2)], 6, OutputDims.read(0))


def _with_grad(shape, value):
    tensor = torch.zeros(shape, requires_grad=True)
    tensor.grad = None if value is None else torch.full(shape, float(value))
    return tensor


def test_inputs_are_joined_by_the_dim_of_their_path() -> None:
    parts = [
        {"rows": _with_grad((2, 3), 1), "table": _with_grad((3,), 1), "scale": _with_grad((), 1)},
        {"rows": _with_grad((1, 3), None), "table": _with_grad((3,), 2), "scale": _with_grad((), 2)},
    ]
    joined = join_input_gradients(parts, [2, 1], CPU, {"0.table": -1}, "0")
    assert joined["rows"].tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert joined["table"].tolist() == [3] * 3
    assert joined["scale"] == 3
    whole = join_input_gradients([{"a": _with_grad((2,), 1)}, {"a": _with_grad((2,), 2)}], [1, 1], CPU, {"0": -1}, "0")
    assert whole["a"].tolist() == [3, 3]
    unused = join_input_gradients([_with_grad((2,), None), _with_grad((1,), None)], [2, 1], CPU, 0, "0")
    assert unused is None


def test_a_list_may_hold_rows_or_columns() -> None:
    columns = [[_with_grad((2, 3), 1), _with_grad((2,), 1)], [_with_grad((2, 3), 2), _with_grad((2,), 2)]]
    joined = join_input_gradients(columns, [2, 2], CPU, 0, "0")
    assert [tuple(grad.shape) for grad in joined] == [(4, 3), (4,)]
    rows = [[_with_grad((3,), 1), _with_grad((5,), 2)], [_with_grad((4,), 3)]]
    joined = join_input_gradients(rows, [2, 1], CPU, 0, "0")
    assert [grad.tolist() for grad in joined] == [[1] * 3, [2] * 5, [3] * 4]
    assert join_input_gradients(["a", "b"], [2, 1], CPU, 0, "0") is None
