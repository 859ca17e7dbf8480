"""The profile of a step for a device, or of a size, that is not there: on fake tensors, or else on few rows."""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError, DPXError, PlanError
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.fake import (
    NO_ANSWER,
    RunsOnFakes,
    fake_device_for,
    faked,
    with_or_without_numbers,
)
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.profile.roofline_costs import RooflineCosts
from lightning_dpx.memory.profile.scaling import extrapolate
from lightning_dpx.torch_compat import FakeTensor, tree_leaves, tree_map_only

Cut = Callable[[int], Any]
_T = TypeVar("_T")
_FEWEST_ROWS = 4  # of a batch that is looked at in parts
_PACKAGE = Path(__file__).parents[2]


def profile_absent(
    module: nn.Module,
    batch: Any,
    target: torch.device,
    step: Callable[[Any], Run],
    *,
    here: torch.device,
    few: Callable[[], tuple[int, Cut]],
    accumulates: bool = False,
    counts_gradients: bool = False,
) -> Profile:
    """A step of ``module`` on ``batch`` as it would be on ``target``; with times from rates, see roofline.py.

    Nothing is allocated where fake tensors can run the step. Where they cannot, a warning says why, and two real steps
    on a quarter and an eighth of the rows are scaled.

    Args:
        module: What is profiled.
        batch: Its input: real tensors, fakes, or tensors on the meta device.
        target: What is planned for.
        step: The step on such a batch.
        here: Where the fakes are: on ``target``, or the host.
        few: Asked if fakes cannot: the number of rows of ``batch``, and what gives its first rows, as many as wanted.
        accumulates: As :func:`profile_step` takes it.
        counts_gradients: As :func:`profile_step` takes it.

    Raises:
        PlanError: the step leads to no backward; or fakes cannot run it, and there are no numbers to run it on.
    """

    def on_fakes(*, numbers: bool) -> Profile:
        with faked(module, batch, target, here, numbers=numbers) as (inputs, costs):
            return profile_step(
                module,
                step(inputs),
                costs.device,
                context=costs.as_on_target,
                costs=costs,
                accumulates=accumulates,
                counts_gradients=counts_gradients,
            )

    def on_rows(why: str) -> Profile:
        rows, cut = few()
        # Without their number, to be said once for the slices of all devices.
        warnings.warn(
            f"Fake tensors cannot run this step of {type(module).__name__} ({why}): a real one runs on few rows of the "
            "batch, and what it takes is scaled to all of its rows.",
            stacklevel=6,
        )
        watch = partial(profile_step, accumulates=accumulates, counts_gradients=counts_gradients)
        return _on_few_rows(module, target, step, rows, cut, watch)

    return on_fakes_or_rows(on_fakes, on_rows, module, batch)


def on_fakes_or_rows(on_fakes: RunsOnFakes[_T], on_rows: Callable[[str], _T], module: nn.Module, batch: Any) -> _T:
    """What a step gives on fake tensors; where those cannot run it, what it gives on a part of the real rows.

    Args:
        on_fakes: Runs the step on fakes, as :func:`with_or_without_numbers` asks for it.
        on_rows: Runs it on real rows, and warns of it; gets the reason why fakes cannot.
        module: What the step is of.
        batch: Its input.

    Raises:
        PlanError: fakes cannot run the step, and there are no numbers to run it on.
    """
    try:
        return with_or_without_numbers(on_fakes)
    except DPXError:  # about the step itself
        raise
    except NO_ANSWER as error:
        why = reason_of(error)
        _require_numbers(module, batch, error)
    # Outside of the handler: there the error would hold what the fakes' step has made.
    return on_rows(why)


def _require_numbers(module: nn.Module, batch: Any, error: Exception) -> None:
    """Whether a real step can be run where fakes cannot run it.

    Args:
        module: What the step is of.
        batch: Its input.
        error: Why fakes cannot.

    Raises:
        PlanError: there are no numbers to run it on.
    """
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(batch)]
    if any(isinstance(t, FakeTensor) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors):
        raise PlanError(
            f"Fake tensors cannot run this step ({reason_of(error)}), and real ones are not there: the module or the "
            "batch is on the meta device or fake. Take what needs numbers out of the step, such as .item() and "
            "branches on tensors, or give a real module and batch; a part of the rows is then run."
        ) from error


def reason_of(error: Exception) -> str:
    """What failed, and the last line of it that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(_PACKAGE))
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(ours):
            lines.append(f"{frame.filename}:{frame.lineno}")
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" + (f", at {lines[-1]}" if lines else "")


def _on_few_rows(
    module: nn.Module,
    target: torch.device,
    step: Callable[[Any], Run],
    rows: int,
    cut: Cut,
    watch: Callable[..., Profile],
) -> Profile:
    def on(count: int) -> Profile:
        given = cut(count)
        here = device_of_step(module, given)
        # Values have the names that they have in a step on all rows.
        costs = RooflineCosts(here, target, part=None if count == rows else (count, rows))
        return watch(module, step(given), here, context=costs.as_on_target, costs=costs)

    # What the numbers rest on goes into the plan, and is shown with it.
    rule = f"for {target}: times by FLOPs and bytes"
    if all(tensor.device.type != target.type for tensor in module.parameters()):
        rule += ", what operators take inside by rule"
    parts = on_two_sizes(on, rows)
    if parts is None:
        return replace(on(rows), basis=f"from a real step {rule}")
    (few, less), (more, larger) = parts
    found = extrapolate(less, larger, (few, more), rows)
    return replace(found, basis=f"from real steps on {few} and {more} of {rows} rows, scaled, {rule}")


def device_of_step(module: nn.Module, batch: Any) -> torch.device:
    """Where a step of ``module`` runs: where its parameters are, or its input where it has none."""
    tensors = (*module.parameters(), *tree_leaves(batch))
    return canonical_device(next(t.device for t in tensors if isinstance(t, torch.Tensor)))


def on_two_sizes(on: Callable[[int], _T], rows: int) -> tuple[tuple[int, _T], tuple[int, _T]] | None:
    """What real steps on an eighth and on a quarter of the rows give, each with how many those are.

    Args:
        on: Runs a step on so many rows.
        rows: Of the batch.

    Returns:
        ``None`` where so few rows cannot be run: there are hardly any, or they belong together, as the nodes and edges
        of a graph do.
    """
    if rows <= _FEWEST_ROWS:
        return None
    few = max(rows // 8, 2)
    more = max(rows // 4, _FEWEST_ROWS)
    try:
        return (few, on(few)), (more, on(more))
    except (*NO_ANSWER, IndexError) as error:
        traceback.clear_frames(error.__traceback__)
        return None


def first_rows(batch: Any) -> tuple[int, Cut]:
    """How many rows the tensors of ``batch`` have along dim 0, by the first of them, and what cuts them.

    Raises:
        ConfigurationError: there is no tensor with rows.
    """
    sizes = [leaf.size(0) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not sizes:
        raise ConfigurationError("The batch has no tensor with rows; give one, or plan without device.")
    rows = sizes[0]

    def cut(count: int) -> Any:
        def first(tensor: torch.Tensor) -> torch.Tensor:
            # A tensor of another size holds no rows of the batch, and is needed as it is.
            if tensor.ndim and tensor.size(0) == rows:
                return tensor[:count]
            return tensor

        return tree_map_only(torch.Tensor, first, batch)

    return rows, cut


def target_of(device: torch.device | str) -> torch.device:
    """What a name stands for.

    Raises:
        ConfigurationError: there is no such type of device.
    """
    try:
        target = torch.device(device)
        # Asked for its error: torch takes names of devices that this build has no module for.
        fake_device_for(target)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigurationError(f"device={device!r} is not allowed; give 'cuda', 'cuda:1' or 'cpu'.") from error
    return target
