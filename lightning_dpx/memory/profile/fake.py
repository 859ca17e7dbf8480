"""A step on fake tensors: sizes without memory, for a batch, a model or a device that is not there.

Forward and backward run as always, operator by operator and through autograd's own engine, so every storage comes and
goes as in a real step; only nothing is computed. [Note: where fakes are] They are on the device that is planned for
where torch can reach it, else on the CPU: a build of torch without a device's runtime ends the process as soon as
autograd meets a tensor that claims to be there. Sizes are the same, and where the operators are not, they are replaced
(:class:`AsOnAccelerators`) or not trusted.

Memory is taken on the host only, where operators are tried one by one (:mod:`lightning_dpx.memory.profile.probe`).

What no fake can tell: numbers, but for small whole ones (:mod:`lightning_dpx.memory.profile.known_numbers`). So it
is not proved that a repeated operator gives the same ones; masks are known from the operator that draws them, and times
from FLOPs and bytes. Nor can a step look at its other numbers (``.item()``, a branch on a tensor), or call an operator
that has no rule for fakes. What libraries of other devices need beside is estimated, which kernel attention takes is
assumed, and ``torch.autocast`` of an absent device does nothing.
"""

import gc
import logging
import traceback
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lightning_dpx.devices import canonical_device, is_host
from lightning_dpx.errors import DPXError
from lightning_dpx.memory.profile.fake_costs import FakeCosts
from lightning_dpx.memory.profile.known_numbers import is_known
from lightning_dpx.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    disable_current_modes,
    is_traceable_wrapper_subclass,
    mark_as_parameter,
    on_distributed_tensors,
    parameters_of,
    tree_map_only,
    with_part,
)

aten: Any = torch.ops.aten
NO_ANSWER = (RuntimeError, TypeError, ValueError, AssertionError)  # of torch, where a fake has none
_T = TypeVar("_T")
_G = TypeVar("_G", covariant=True)  # what a run gives


def fake_device_for(target: torch.device) -> torch.device:
    """Where the fakes of a step for ``target`` are; see [Note: where fakes are]."""
    if is_host(target) or not torch.get_device_module(target).is_available():
        return torch.device("cpu")
    # One that is beyond those of this machine: autograd's thread of it would end the process.
    if target.index is not None and target.index >= torch.get_device_module(target).device_count():
        return torch.device(target.type, 0)
    return canonical_device(target)


class _Fakes:
    """The fakes of a step's tensors: one for one tensor, however often it is reached, so that tied ones stay tied.

    Args:
        mode: Whose fakes they are.
        here: Where they are.
        numbers: Whether small whole numbers stay real.
        sharded: Whether spread parameters stay so, with fakes for the parts that are here.
    """

    def __init__(self, mode: FakeTensorMode, here: torch.device, *, numbers: bool, sharded: bool) -> None:
        self._mode = mode
        self._here = here
        self._numbers = numbers
        self._sharded = sharded
        self._known: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor, or the copy of numbers that stay real."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._made(tensor)
        return self._known[id(tensor)]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._sharded and is_traceable_wrapper_subclass(tensor):
            return _fake_parts_of(tensor, self._mode)
        if self._numbers and is_known(tensor):
            return _copy_of(tensor)
        return _fake_of(tensor, self._here)

    def clear(self) -> None:
        """Forgets all of them."""
        self._known.clear()


@contextmanager
def faked(
    module: nn.Module,
    batch: Any,
    target: torch.device,
    here: torch.device,
    *,
    numbers: bool = True,
    sharded: bool = False,
) -> Iterator[tuple[Any, FakeCosts]]:
    """Inside, the parameters and buffers of ``module`` are fakes, and it works on fakes and small whole numbers only.

    Its tensors may also be on the meta device, or fakes of another mode. All its attributes are put back.

    Args:
        module: Any module.
        batch: Any nested structure with tensors, real ones or not.
        target: What is planned for.
        here: Where the fakes are.
        numbers: Whether small whole numbers stay real, with which the step takes the branches that it really does.
        sharded: Whether parameters that ``fully_shard`` has spread stay so, with fakes for the parts that are here.

    Yields:
        The batch as fakes, and what watches a step on it.

    Raises:
        TypeError: a tensor has no fake: it is sparse, of a subclass, not initialized, or in a ScriptModule.
    """
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise TypeError("a ScriptModule takes no fake tensors")
    # Real tensors meet fakes in operators: whole numbers that stay real, and constants that are no
    # attributes of a module.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    numbers = numbers and is_host(here)
    costs = FakeCosts(mode, here, target, numbers=numbers)
    fakes = _Fakes(mode, here, numbers=numbers, sharded=sharded)
    with _put_back(module), _untold(), mode:
        # All are found before any is replaced, so that the walk meets no fakes.
        tensors: list[tuple[nn.Module, str, torch.Tensor]] = []
        for child in module.modules():
            tensors += _tensors_of(child)
        for child, name, _ in tensors:
            for registered in (parameters_of(child), buffers_of(child)):
                if name in registered:
                    registered[name] = None
        if not sharded:
            module.to(here)  # there is nothing to move, but a LightningModule remembers the device
        for child, name, tensor in tensors:
            setattr(child, name, fakes.of(tensor))  # recurrent layers notice
        yield tree_map_only(torch.Tensor, fakes.of, batch), costs
    tensors.clear()
    fakes.clear()
    # Fakes that only cycles hold have been left by nothing, and would be told of below.
    gc.collect()
    _warn_of(costs.left_behind)


@contextmanager
def _untold() -> Iterator[None]:
    """In here torch logs no traceback of an operator that fakes cannot run: what is done instead is told anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_failed_fake)
    try:
        yield
    finally:
        log.removeFilter(_is_no_failed_fake)


def _is_no_failed_fake(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _warn_of(left_behind: int) -> None:
    """Tells of fakes that outlive a step."""
    if left_behind:
        warnings.warn(
            f"The step left {left_behind} fake tensors in something outside of the module that outlives it, such "
            "as a cache; do not run real steps in this process.",
            stacklevel=7,
        )


class RunsOnFakes(Protocol[_G]):
    """A step on fake tensors."""

    def __call__(self, *, numbers: bool) -> _G:
        """What it gives; ``numbers`` says whether small whole numbers are real all the same, as :func:`faked` does."""


def with_or_without_numbers(run: RunsOnFakes[_T]) -> _T:
    """What ``run`` gives with small whole numbers that stay real, as :func:`faked` takes it; if need be, without."""
    try:
        return run(numbers=True)
    except DPXError:  # about the step itself, whichever built-in error it is as well
        raise
    except NO_ANSWER as error:  # it may be that numbers of fakes were to be written into real ones
        # Its frames hold fakes of the run that was broken off.
        traceback.clear_frames(error.__traceback__)
        return run(numbers=False)


def _tensors_of(child: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The tensors that ``child`` itself holds, with their names; also plain attributes."""
    found = []
    for held in (parameters_of(child), buffers_of(child), vars(child)):
        for name, entry in held.items():
            if isinstance(entry, torch.Tensor):
                found.append((child, name, entry))
    return found


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Restores on exit every attribute of every submodule, and the contents of plain containers among them."""
    states: list[tuple[Any, Any]] = []
    for child in module.modules():
        attributes = vars(child)
        states.append((attributes, dict(attributes)))
        for value in attributes.values():
            if type(value) in (dict, OrderedDict, defaultdict):
                states.append((value, dict(value)))
            elif type(value) in (list, set, deque):
                states.append((value, list(value)))
    try:
        yield
    finally:
        # Filled again instead of replaced: others may hold the same dict or list.
        for container, content in states:
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A real copy, so that what the step writes is not kept."""
    with disable_current_modes():
        return tensor.detach().clone()


def _fake_parts_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like ``tensor``, which is made of others, such as a distributed one, made of fakes of those."""
    # The mode remembers what its fakes are of by weak references, and a tensor that has any cannot be moved to another
    # device; so it is given another one with the same memory.
    made: torch.Tensor = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made


def _fake_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake of ``tensor`` on ``device``, of the mode that is active."""
    if on_distributed_tensors((type(tensor),)):
        part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        return with_part(tensor, _fake_of(part, device))
    if type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        raise TypeError(f"there is no fake of a {type(tensor).__name__} with layout {tensor.layout}")
    # Strides as they are: kernels and views depend on them.
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    made.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(made)
        if tensor.grad is not None and tensor.grad.layout is torch.strided:
            # Backward adds to a gradient that is there, and takes other memory than for a first
            # one.
            made.grad = torch.empty_like(made)
    return made
