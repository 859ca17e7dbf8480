"""The outputs of a group's forward: their shapes beforehand, all of them as one, and what a metric sees of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import preserve_module_state
from lightning_dpx.errors import GatherError, SliceError
from lightning_dpx.replicas import BatchDim, BatchSlice, OutputDims, gather, map_result, map_tensors, slice_batch
from lightning_dpx.torch_compat import FakeTensorMode


def shapes_of_outputs(
    module: nn.Module, device: torch.device, inputs: Sequence[Any], named_inputs: Mapping[str, Any]
) -> Any:
    """The shapes of the module's outputs, in their own structure, without computing them."""
    # What a forward leaves in attributes is put back. Constants that it keeps outside of the state
    # dict are real tensors.
    with preserve_module_state(module), FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():

        def faked(value: torch.Tensor) -> torch.Tensor:
            return fake.from_tensor(value).to(device)

        # Fakes are given to the call instead of being put into the module, so nothing needs to
        # be put back.
        state = {name: faked(value) for name, value in module.state_dict(keep_vars=True).items()}
        args, kwargs = map_tensors(faked, (inputs, named_inputs))
        outputs = torch.func.functional_call(module, state, args, kwargs)
    return map_result(lambda output: tuple(output.shape), outputs)


def merge_outputs(slices: Sequence[BatchSlice], outputs: Sequence[Any], device: torch.device, dims: OutputDims) -> Any:
    """The outputs of all slices as one device would have returned them.

    Args:
        slices: What the replicas ran on.
        outputs: What they returned for it.
        device: Where the result is.
        dims: The batch dims of the outputs.

    Raises:
        ConfigurationError: ``dims`` names one that is not there.
        GatherError: the replicas returned different structures, or some of them ``None``.
    """
    rows = [batch_slice.num_rows for batch_slice in slices]
    without = [one.replica for one, output in zip(slices, outputs, strict=True) if output is None]
    # Where all of them returned None, so would one device.
    if without and len(without) < len(outputs):
        named = ", ".join(f"{replica.index} on {replica.device}" for replica in without)
        raise GatherError(
            f"Replica {named} returned None, and others did not, so the rows of their slices have no outputs; "
            "return the same structure for all rows, or read outputs()."
        )
    dims.check(outputs[0])
    return gather(outputs, rows, device, dims)


def update_metric(
    metric: Any, labels: Any, slices: Sequence[BatchSlice], outputs: Sequence[Any], device: torch.device, dim: BatchDim
) -> None:
    """Calls ``metric.update`` for every slice, with its outputs and its slice of the labels.

    Args:
        metric: Anything with an ``update``; a ``device`` of its own is respected.
        labels: Of the whole batch.
        slices: What the replicas ran on.
        outputs: What they returned for it.
        device: Where a metric gets its tensors that has no device.
        dim: Of the labels, as of the inputs.

    Raises:
        SliceError: the labels have another number of rows than the batch, or cannot be cut.
    """
    # Metrics of torchmetrics have a device of their own.
    device = getattr(metric, "device", device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device)

    rows = [batch_slice.num_rows for batch_slice in slices]
    try:
        parts = slice_batch({"labels": labels}, rows, dim)
    except SliceError as error:
        error.add_note(f"In update_metric(), after a forward of {sum(rows)} rows.")
        raise
    # All are cut before the metric sees the first: it would else count some of them twice.
    for output, part in zip(outputs, parts, strict=True):
        metric.update(*map_tensors(move, (output, part["labels"])))
