"""The autograd graph as a tape: how a value can be made again, and from which others.

Every node keeps what it needs for its own backward, and its edges lead to the nodes before it. So most values can be
computed again from what the graph holds anyway: :class:`GraphTape` finds the recipe of a node and the values that it
takes, along the edges. Where no recipe is known, a call of a module may be made again instead.

    find_recipe(value)    recipe of its node -> what it takes:  an edge      -> flowing: known there, or made in turn
                                                                saved        -> read_saved: without unpacking it
                                                                an operand   -> constant: noted in the forward
                          no recipe          -> the call that has returned or saved it

A node knows its values by weak references in its metadata.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from lightning_dpx.memory.execute.call_arguments import Argument
from lightning_dpx.memory.execute.calls import Call, OutputKey, SelectiveReplay, returned_by, select_output
from lightning_dpx.memory.execute.distributed_tensors import DistributedValue
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes import OWN_RECIPES, VIEWS, NotNoted, NotRecomputable, recipe_for
from lightning_dpx.memory.execute.recipes.registry import Recipe
from lightning_dpx.memory.execute.tensor_identity import Identity
from lightning_dpx.memory.execute.untracked_inputs import WeakTensor, copy_of, operand_of
from lightning_dpx.memory.execute.values import Both, Make, Value, View, keep
from lightning_dpx.torch_compat import output_metadata

_TAG = "lightning_dpx.values"
GIVEN = "lightning_dpx.given"  # to calls: what is made from it otherwise cannot count on those calls being made again
_MOST_UNSAVED = 64  # operators in a row that save nothing; a longer chain would recurse too deeply
_WORTH_A_CALL = 16  # arguments of a call may be so many times larger: the statistics of a norm are not worth it


class ReachedValues:
    """Values that others are made from, found along the graph: a later step has to give them their names as well.

    Values may be gone before the step is over, with all that was made from them, and get their names late.
    """

    def __init__(self) -> None:
        self._names = set[str]()
        self._unnamed = weakref.WeakSet[Value]()

    def add(self, value: Value) -> None:
        """Adds one that was found."""
        if value.name:
            self._names.add(value.name)
        else:
            self._unnamed.add(value)

    def named(self, value: Value) -> None:
        """A value has its name now, whether it was found or not."""
        if value in self._unnamed:
            self._names.add(value.name)

    @property
    def names(self) -> set[str]:
        """The names of those found that have one."""
        return set(self._names)


class GraphTape:
    """Finds how values are made again.

    Args:
        names: Tells which module call is running.

    Attributes:
        names: As given.
        refused: Why values cannot be made again, by name.
        reached: Values that others are made from, found along the graph; ``None`` where they are not asked for.
        needs_operands: Whether a recipe has asked for operands that are to be noted in the forward.
    """

    def __init__(self, names: CallNames) -> None:
        self.names = names
        self.refused: dict[str, str] = {}
        self.reached: ReachedValues | None = None
        self.needs_operands: bool = True

    def unpack(self, saved: Any) -> torch.Tensor:
        """The unpack hook that saved tensors of this tape have, by which :meth:`packed` knows them."""
        raise NotImplementedError

    def find_recipe(self, value: Value, node: Any | None, output: int) -> bool:
        """Whether ``value``, which is being saved, can be made again; if so it knows how."""
        if value.make is not None:
            return True
        try:
            value.learn(*self._way_to(value, node, output))
        except NotRecomputable as error:
            self.refused[value.name] = str(error)
            return False
        self.refused.pop(value.name, None)  # an earlier step may have been another one
        for source in value.sources:
            source.add_use()
        return True

    def _way_to(self, value: Value, node: Any | None, output: int) -> tuple[Make, Sequence[Any]]:
        """Its recipe; where there is none, the call that makes it."""
        try:
            if node is None:
                raise NotRecomputable("it does not come from the graph")
            return self._recipe(node, output, 0, value.identity)
        except NotRecomputable:
            identity = value.identity
            if identity is None or not self.names.again:
                raise
            call = self.names.call_that_makes(identity.storage)
            # Until it is made again, the call keeps its arguments.
            if (
                call is None
                or _WORTH_A_CALL * math.prod(identity.size) * identity.dtype.itemsize < call.arguments.num_bytes
            ):
                raise
            # This tensor has been counted already, before it was packed.
            key = OutputKey("saved", self.names.saved - call.saved - 1)
            return select_output, self._picked(call, key, identity.size, identity.dtype)

    def _recipe(
        self, node: Any, output: int, depth: int, identity: Identity | None = None
    ) -> tuple[Make, Sequence[Any]]:
        if depth > _MOST_UNSAVED:
            raise NotRecomputable(f"more than {_MOST_UNSAVED} operators in a row save nothing")
        try:
            return self._recipe_of_node(node)(Node(self, node, output, depth, identity))
        except NotRecomputable:
            call_and_key = returned_by(node, output)
            if call_and_key is None:
                raise
            like = output_metadata(node)[output]
            return select_output, self._picked(*call_and_key, torch.Size(like.shape), like.dtype)
        except Exception as error:
            # Those of this package are tried with every version of torch that it supports.
            if node.name() in OWN_RECIPES:
                error.add_note(f"It happened in the recipe that register_recipe({node.name()!r}) was given.")
            raise

    def _recipe_of_node(self, node: Any) -> Recipe:
        """How the operator of ``node`` is repeated."""
        return recipe_for(node.name())

    def _picked(self, call: Call, key: OutputKey, size: torch.Size, dtype: torch.dtype) -> tuple[Value, OutputKey]:
        """The value that ``call`` becomes, and which output to select from it."""
        if call.obstacle:
            raise NotRecomputable(f"{call.name!r} cannot be called again: {call.obstacle}")
        # What collectives have given is kept for calls that are replayed as a whole alone.
        if call.is_distributed:
            raise NotRecomputable(f"{call.name!r} cannot be called again for some of its tensors: processes meet in it")
        outcome: Value | None = call.outcome() if call.outcome is not None else None
        if outcome is None:
            outcome = Value("", f"a call of {type(call.module).__name__}")
            outcome.learn(SelectiveReplay(call), [self._argument(argument) for argument in call.arguments.tensors])
            outcome.dropped = True
            for source in outcome.sources:
                source.add_use()
            # Weakly: the value holds the call, and cycles would live until Python looks for them,
            # which it does not while a planned forward runs.
            call.outcome = weakref.ref(outcome)
        assert isinstance(outcome.make, SelectiveReplay), "it is a call"
        outcome.make.request(key, size, dtype)
        return outcome, key

    def _argument(self, argument: Argument) -> Value | View:
        """The value of what a call takes."""
        tensor = argument.tensor()
        if argument.source is not None:
            try:
                return self.flowing(*argument.source, 0)
            except NotRecomputable:
                if tensor is None:
                    raise
        if tensor is None:
            raise NotRecomputable("an argument of the call is gone")
        if argument.source is None:
            return self.keep_argument(argument, tensor)
        # It is marked apart from the values of the graph: no recipe may find it there and count on
        # a tensor that is kept for calls only.
        value = known_value(*argument.source, GIVEN)
        if value is None:
            value = self.keep_argument(argument, tensor)
            value.operator = argument.source[0].name()
            mark_output(*argument.source, value, GIVEN)
        return value

    def keep_argument(self, argument: Argument, tensor: torch.Tensor) -> Value:
        """The value of ``tensor``, which is that argument of a call."""
        return self.keep_constant(tensor)

    def flowing(self, node: Any, output: int, depth: int) -> Value | View:
        """What flows along an edge of the graph. A view of a value is no value of its own."""
        value = known_value(node, output)
        if value is not None:
            if self.reached is not None:
                self.reached.add(value)
            return value
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            # The node holds the parameter, which is there anyway.
            value = Value("", "leaf")
            value.keep(node.variable)
        else:
            make, inputs = self._recipe(node, output, depth + 1)
            if name in VIEWS and make is not select_output:  # a call that is made again gives the view itself
                (base,) = inputs
                if type(base) is Value:
                    return View(base, make)
                return View(base.value, Both(base.look, make))
            value = Value("", name)
            value.learn(make, inputs)
            value.dropped = True
            for source in value.sources:
                source.add_use()
        # Weakly: what nothing is made from goes as soon as it has been looked at.
        mark_output(node, output, value)
        if self.reached is not None:
            self.reached.add(value)
        return value

    def constant(self, node: Any, index: int, most: int) -> Any:
        """An operand of ``node`` that is not part of the graph: a value, a view of one, or a number as it is."""
        self.request_operands(node)
        operand = operand_of(node, index)
        if not isinstance(operand, WeakTensor):
            return operand
        # A detached part of a value, as a cache of keys, goes with it where that is dropped, and comes back with it.
        part = self.part_of_value(operand) if operand.storage else None
        if part is not None:
            if self.reached is not None:
                self.reached.add(part.value)
            return part
        value = self.keep_constant(operand.base(most))
        if operand.view is None:
            return value
        return View(value, operand.look)

    def part_of_value(self, operand: WeakTensor) -> View | None:
        """The operand as it shows a value that was saved, or a part of it; ``None`` if it shows none."""
        return None

    def request_operands(self, node: Any) -> None:
        """The next step notes operands, too: a recipe has asked for those of ``node``."""
        self.needs_operands = True

    def keep_constant(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor outside of the graph; it may not be written to before backward."""
        value = Value("", "constant")
        value.keep(tensor)
        return value

    def read_saved(self, node: Any, name: str) -> Any:
        """What ``node`` saved under ``name``: a value, a view of one, or anything else as it is; ``None`` without.

        Raises:
            NotRecomputable: it is in the hands of others, who would bring it back, or run a region again, right now.
        """
        # ``_saved_{name}`` would call the unpack hook, ``_raw_saved_{name}`` does not; an argument
        # that is no tensor has only the former.
        saved = getattr(node, f"_raw_saved_{name}", None)
        if saved is None:
            return getattr(node, f"_saved_{name}")  # a number
        held = self.packed(node, saved)
        if held is None:
            _refuse_released(node, name)
        return held

    def packed(self, node: Any, saved: Any) -> Any:
        """What a saved tensor of ``node`` holds, as :meth:`read_saved` gives it."""
        hook = saved.unpack_hook
        if hook == self.unpack:  # a bound method is another object every time
            if type(saved.data) is DistributedValue:
                raise NotRecomputable(f"{node.name()} may talk to other processes")
            return saved.data
        if hook is None:  # saved where no hooks were on
            return _unnamed(saved.data)
        raise NotRecomputable(
            f"what {node.name()} saved is offloaded, or in a region of torch.utils.checkpoint, or has other hooks"
        )


def known_value(node: Any, output: int, tag: str = _TAG) -> Value | None:
    """The value of that output, if there is one already."""
    # Most nodes have one output; for that one no tuple is made, here and in :func:`mark_output`.
    known = node.metadata.get((tag, output) if output else tag)
    if known is None:
        return None
    value: Value | None = known()
    return value


def _refuse_released(node: Any, name: str) -> None:
    """Where a node has nothing under ``name``, it may be because a backward of the step's own has used it up.

    Raises:
        NotRecomputable: that is so.
    """
    try:
        getattr(node, f"_saved_{name}")
    except RuntimeError as error:
        raise NotRecomputable(f"a backward of the step has used up what {node.name()} saved") from error


def mark_output(node: Any, output: int, value: Value, tag: str = _TAG) -> None:
    """Marks the output as ``value``, weakly, so that a node keeps no value alive."""
    node.metadata[(tag, output) if output else tag] = weakref.ref(value)


class Node:
    """A node of the graph, as a recipe sees it."""

    def __init__(self, owner: GraphTape, node: Any, output: int, depth: int, identity: Identity | None = None) -> None:
        self._owner = owner
        self._node = node
        self._depth = depth
        self._identity = identity
        self.output = output

    def __getattr__(self, name: str) -> Any:
        """An argument of the operator that is not a tensor.

        Raises:
            NotNoted: the node has none of this name.
        """
        try:
            return getattr(self._node, f"_saved_{name}")
        except AttributeError as error:
            raise NotNoted(f"{self._node.name()} of torch {torch.__version__} notes no {name}") from error

    def saves(self, name: str) -> bool:
        """Whether the operator has saved a tensor under ``name``."""
        # To ask for ``_saved_{name}`` would unpack it: a use that is none, and that looks like a backward of a step.
        return hasattr(self._node, f"_raw_saved_{name}")

    def edge(self, index: int) -> Value | View:
        """The input tensor number ``index``, found along the graph."""
        source, output = self._node.next_functions[index]
        if source is None:
            raise NotRecomputable(f"input {index} of {self._node.name()} is not part of the graph")
        return self._owner.flowing(source, output, self._depth)

    def operand(self, index: int) -> Any:
        """The input tensor number ``index`` along the graph; the operand in its place if there is no such edge."""
        if self.has_edge(index):
            return self.edge(index)
        return self.constant()

    def constant(self, index: int = 0) -> Any:
        """Operand number ``index`` of those that are not part of the graph."""
        # A tensor of the step that has to be kept for this must be worth it: no more than half of
        # what goes in exchange.
        most = math.prod(self.shape) * self.dtype.itemsize // 2
        return self._owner.constant(self._node, index, most)

    def copies(self, *names: str) -> list[torch.Tensor]:
        """What these inputs held when the operator ran, of those that are written to without a new version."""
        self._owner.request_operands(self._node)
        return [copy_of(self._node, name) for name in names]

    def saved(self, name: str, edge: int | None = None) -> Any:
        """The input tensor that the operator saved under ``name``; if it did not, the one along ``edge``."""
        if edge is not None:
            source, output = self._node.next_functions[edge]
            known = None if source is None else known_value(source, output)
            if known is not None and known.identity is not None:
                # The node's own saved tensor would be found in later steps as well. Where it has
                # none, this value has to be named in each of them: the routine is told of it.
                if self._owner.reached is not None and self._owner.read_saved(self._node, name) is None:
                    self._owner.reached.add(known)
                return known  # saved, so it may not have been written to
        saved = self._owner.read_saved(self._node, name)
        if saved is not None:
            return saved
        if edge is None:
            raise NotRecomputable(f"{self._node.name()} did not save {name}")
        return self.edge(edge)

    def optional(self, name: str) -> Any:
        """The tensor that the operator saved under ``name``, or ``None``."""
        return self._owner.read_saved(self._node, name)

    def saved_list(self, name: str) -> list[Any]:
        """The tensors that the operator saved under ``name``, where it is a list; ``None`` for those that are none."""
        raw = getattr(self._node, f"_raw_saved_{name}")
        entries = [self._owner.packed(self._node, saved) for saved in raw]
        # ``None`` is an index that was left out, as in ``x[:, index]``, or all were used up.
        if any(entry is None for entry in entries):
            _refuse_released(self._node, name)
        return entries

    @property
    def saved_strides(self) -> tuple[int, ...] | None:
        """The strides of the output where it is saved; ``None`` elsewhere."""
        if self._identity is None:
            return None
        return self._identity.stride

    @property
    def num_edges(self) -> int:
        """The number of input tensors, also of those without an edge."""
        return len(self._node.next_functions)

    def has_edge(self, index: int) -> bool:
        """Whether input ``index`` is part of the graph."""
        return self._node.next_functions[index][0] is not None

    @property
    def shape(self) -> list[int]:
        """The shape of the output."""
        return list(output_metadata(self._node)[self.output].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        if self._identity is not None:  # the metadata are made anew for every look, and for all outputs
            return self._identity.dtype
        dtype: torch.dtype = output_metadata(self._node)[self.output].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the output."""
        device: torch.device = output_metadata(self._node)[self.output].device
        return device


def _unnamed(saved: Any) -> Any:
    """What autograd holds itself, without the graph that led to it."""
    if not isinstance(saved, torch.Tensor) or (saved.ndim == 0 and not saved.requires_grad):
        return saved  # a number, which may come as a tensor
    return keep(saved)
