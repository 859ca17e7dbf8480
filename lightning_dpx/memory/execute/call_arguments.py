"""What a call of a module is given, noted by weak references: to be given once more, and nothing lives longer for it.

[Note: what cannot be given again] Writes to an argument have to be noticed and its memory has to be known, so inference
tensors, sparse tensors and subclasses are refused, and so are objects that may have changed by then.
"""

import copy
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.transforms import is_transformed
from lightning_dpx.python_objects.object_graph import PLAIN
from lightning_dpx.torch_compat import FakeTensor, key_of, tree_flatten, tree_unflatten, version_counter

_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)  # steps are profiled on fakes, too
_PLAIN = (*PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_LEAVES = (torch.Tensor, bool, int, float, type(None))


class Argument:
    """A tensor that a call takes, weakly, and where it comes from in the graph.

    Attributes:
        requires_grad: Whether it does.
        source: Its node and the number of the output, if it has one.
    """

    __slots__ = ("_counter", "_held", "_reference", "_version", "requires_grad", "source")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._held: torch.Tensor | None = None
        self._reference = TensorWeakRef(tensor)
        self._version = version_counter(tensor)
        self._counter: torch.Tensor | None = None
        self.requires_grad: bool = tensor.requires_grad
        self.source = None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)

    def tensor(self) -> torch.Tensor | None:
        """The tensor as it was, if it is still there.

        Raises:
            NotRecomputable: it was written to.
        """
        tensor: torch.Tensor | None = self._reference()
        counter = self._counter if tensor is None else tensor
        if counter is not None and version_counter(counter) != self._version:
            raise NotRecomputable("an argument of the call was changed in place")
        return tensor

    def apart(self) -> "Argument":
        """A copy of this argument without the graph that leads to it."""
        duplicate = copy.copy(self)
        duplicate.settle()
        return duplicate

    def hold(self) -> None:
        """Keeps it until the forward is over, for a value that is made from it and is saved only later."""
        self._held = self._reference()

    def settle(self) -> None:
        """Forward is over; the graph that leads to it must not be held any longer."""
        self.source = self._held = None

    def watch(self, tensor: torch.Tensor) -> None:
        """Keeps count of what is written to it, also through others once it is gone itself; not its memory."""
        # A detached tensor shares the count of writes, also after its data were exchanged.
        if type(tensor) is not FakeTensor:
            self._counter = tensor.detach()
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def is_in(self, storage: int) -> bool:
        """Whether that is its memory."""
        tensor: torch.Tensor | None = self._reference()
        return tensor is not None and key_of(tensor.untyped_storage()) == storage


class CallArguments:
    """All that a call is given, and how it was put together.

    Args:
        args: By position.
        kwargs: By name.

    Attributes:
        obstacle: Why they cannot be given again; empty if they can.
        tensors: The tensors among them, each once; none if there is an obstacle.
        num_bytes: Of these.
        device: Of the first of these, if there is one.
    """

    __slots__ = ("_leaves", "_spec", "device", "num_bytes", "obstacle", "tensors")

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._spec = _flattened(args, kwargs)
        self.obstacle: str = _obstacle(leaves)
        self.tensors: list[Argument] = []
        self.num_bytes: int = 0
        self.device: torch.device | None = None
        self._leaves: list[Any] = []
        if not self.obstacle:
            self._note(leaves)

    def _note(self, leaves: Sequence[Any]) -> None:
        noted: dict[int, Argument] = {}  # one tensor may be given several times
        for leaf in leaves:
            # Numbers and flags are held as they are: nothing can write to them.
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
                continue
            if id(leaf) not in noted:
                noted[id(leaf)] = Argument(leaf)
                self.num_bytes += leaf.nbytes
                if self.device is None:
                    self.device = leaf.device
            self._leaves.append(noted[id(leaf)])
        self.tensors.extend(noted.values())

    def forget(self) -> None:
        """They will not be given again."""
        self.tensors = []
        self._leaves = []
        self.num_bytes = 0

    def settle(self) -> None:
        """Forward is over; the graph that leads to them must not be held any longer."""
        for argument in self.tensors:
            argument.settle()

    def apart(self) -> "CallArguments":
        """A copy without the graph that leads to them."""
        apart = {id(argument): argument.apart() for argument in self.tensors}
        duplicate = copy.copy(self)
        duplicate.tensors = list(apart.values())
        duplicate._leaves = [apart.get(id(leaf), leaf) for leaf in self._leaves]
        return duplicate

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of them, by its place in the graph."""
        return any(argument.source == (tensor.grad_fn, tensor.output_nr) for argument in self.tensors)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The arguments, by position and by name, with these ``tensors`` in the place of those that were noted."""
        # Leaves this time, for the graph of the second call ends with it; that need gradients as
        # they did, for autograd decides by that what it saves.
        anew = {
            argument: tensor.detach().requires_grad_(argument.requires_grad)
            for argument, tensor in zip(self.tensors, tensors, strict=True)
        }
        given = [anew[leaf] if isinstance(leaf, Argument) else leaf for leaf in self._leaves]
        if isinstance(self._spec, tuple):
            count, names = self._spec
            return given[:count], dict(zip(names, given[count:], strict=True))
        args, kwargs = tree_unflatten(given, self._spec)
        return args, kwargs


def _obstacle(leaves: Collection[Any]) -> str:
    """Why these cannot be given again; empty if they can."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in _TENSORS or leaf.layout is not torch.strided or leaf.is_inference():
                return f"it takes a {type(leaf).__name__} with layout {leaf.layout}, of inference mode or a subclass"
            if is_transformed(leaf):
                return "it runs inside a transform of torch.func"
        elif not isinstance(leaf, (*_PLAIN, Enum)):
            return f"it takes a {type(leaf).__name__}, which may change"
    return ""


def _flattened(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The arguments one by one, and how they were put together: most calls take no lists."""
    # ``tree_flatten`` walks containers in Python, at every call.
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, _LEAVES) for leaf in leaves):
        return leaves, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))
