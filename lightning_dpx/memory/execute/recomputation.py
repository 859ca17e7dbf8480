"""Values that backward asks for are computed again, from what is kept, and let go after their last use."""

import torch

from lightning_dpx.memory.execute.calls import SelectiveReplay
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable
from lightning_dpx.memory.execute.values import Value, read
from lightning_dpx.memory.execute.write_checks import refuse_changed
from lightning_dpx.torch_compat import (
    DisableAutocast,
    DisableTorchFunction,
    is_any_autocast_enabled,
    is_torch_function_mode_enabled,
    version_counter,
)


def compute(target: Value) -> torch.Tensor:
    """The tensor of ``target``, made from what is kept; leaves behind what others still wait for."""
    is_plain = _surroundings_are_plain()
    # As it is nearly always: one operator, whose inputs are there.
    if is_plain and not isinstance(target.make, SelectiveReplay) and _has_all(target):
        made_now = target.tensor = run_recipe(target)
        release_inputs(target)
        return made_now
    under_way = _Computation(target)
    while under_way.stack:
        if is_plain:
            under_way.run_operators()
        else:
            # Autocast has converted the inputs already, and would do so once more; a function mode of the step, such
            # as a shift's, must not move what is repeated where it was.
            with torch.no_grad(), DisableAutocast(), DisableTorchFunction():
                under_way.run_operators()
        if under_way.stack:
            # A call of a module ends the loop over operators: it runs outside of these contexts.
            call = under_way.stack.pop()
            call.tensor = run_recipe(call)  # with gradients and autocast as in forward
            under_way.note_made(call)
    for value in under_way.later:
        release_inputs(value)
    return target.held()


def _surroundings_are_plain() -> bool:
    """Whether operators run without gradients, autocast and function modes anyway; contexts for that take longer."""
    return not (torch.is_grad_enabled() or is_any_autocast_enabled() or is_torch_function_mode_enabled())


def _has_all(value: Value) -> bool:
    return all(source.tensor is not None for source in value.sources)


class _Computation:
    """A value that is being made, with all on the way to it that is not there.

    Attributes:
        stack: What is yet to be made, the next one last.
        later: What was made, and whose inputs are told of it only at the end.
    """

    __slots__ = ("_made", "_target", "_uses", "later", "stack")

    def __init__(self, target: Value) -> None:
        self.stack = [target]
        self.later = list[Value]()
        self._target = target
        self._made = set[Value]()
        self._uses: dict[Value, int] | None = None  # of nested values, that are still to come

    def run_operators(self) -> None:
        """Until the stack is empty, or a call of a module is on top of it and has all that it takes."""
        stack = self.stack
        while stack:
            value = stack[-1]
            # Two values on the stack were waiting for it.
            if value.tensor is not None:
                stack.pop()
                continue
            missing = [source for source in value.sources if source.tensor is None]
            if missing:
                # What can be made at once, such as a mask, is not to wait for a long way.
                if len(missing) > 1:
                    missing.sort(key=_has_all, reverse=True)
                stack += missing
                continue
            if isinstance(value.make, SelectiveReplay):
                return
            value.tensor = run_recipe(value)
            stack.pop()
            self.note_made(value)

    def note_made(self, value: Value) -> None:
        """``value`` has just been made."""
        needed = self._nested_that_stay(value)
        # After a part of a backward the counts are off: nothing is forgotten before the end.
        if self.later or (value in self._made and not value.uncached):
            self.later.append(value)
        else:
            self._made.add(value)
            release_inputs(value)
        # Giving the uses back has forgotten uncached inputs; those of more to come are put back.
        for source, tensor in needed:
            source.tensor = tensor

    def _nested_that_stay(self, made: Value) -> list[tuple[Value, torch.Tensor | None]]:
        """Of the nested values that ``made`` was made from, those from which more is made; forgets the others."""
        sources = [source for source in made.sources if source.nested]
        if not sources:
            return []
        # Counted once ``made`` is there, so without its own uses.
        if self._uses is None:
            self._uses = self._uses_to_come()
        else:
            for source in sources:
                self._uses[source] = self._uses.get(source, 0) - 1
        stay = []
        for source in sources:
            if self._uses.get(source, 0) > 0:
                stay.append((source, source.tensor))
            else:
                source.tensor = None
        return stay

    def _uses_to_come(self) -> dict[Value, int]:
        """How often each nested value is an input of what is not there yet."""
        uses = dict[Value, int]()
        stack = [self._target]
        seen = {self._target}
        while stack:
            value = stack.pop()
            if value.tensor is not None:
                continue
            for source in value.sources:
                if source.nested:
                    uses[source] = uses.get(source, 0) + 1
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return uses


def repeat(value: Value) -> torch.Tensor:
    """One operator or call, on inputs that are there, as backward will make it."""
    if isinstance(value.make, SelectiveReplay):
        return run_recipe(value)
    with torch.no_grad(), DisableAutocast():
        return run_recipe(value)


def run_recipe(value: Value) -> torch.Tensor:
    """One operator, on inputs that are there."""
    make = value.make
    if make is None:
        raise NotRecomputable(f"{value.name or value.operator} has no recipe")
    # Saved tensors are checked when backward asks for them; inputs of recipes only here.
    for source in value.sources:
        if not source.dropped and source.tensor is not None and version_counter(source.tensor) != source.version:
            refuse_changed(source)
    value.made = True
    made: torch.Tensor = make(*[entry.tensor if type(entry) is Value else read(entry) for entry in value.inputs])
    identity = value.identity
    # The profile has compared the numbers, of one step; in all others shape and dtype must agree.
    if identity is not None and (made.dtype is not identity.dtype or made.size() != identity.size):
        raise RuntimeError(
            f"{value.operator} gave {list(made.size())} in {made.dtype} for {value.name} when it was repeated, instead "
            f"of {list(identity.size)} in {identity.dtype}. Please report this; keep the value in the plan until then."
        )
    if identity is not None and made.stride() != identity.stride and identity.is_dense_unlike(made):
        made = torch.empty_strided(identity.size, identity.stride, dtype=made.dtype, device=made.device).copy_(made)
    return made


def release_inputs(value: Value) -> None:
    """``value`` has been made: its inputs are asked for once less, unless it will be made again."""
    for source in value.sources:
        if not value.uncached:
            release_use(source)
        elif source.uncached and not source.nested:
            source.tensor = None


def release_use(value: Value) -> None:
    """One of those that need ``value`` has had it; after the last its tensor is forgotten."""
    stack = [value]
    # A chain of uncached values may be longer than Python recurses.
    while stack:
        value = stack.pop()
        value.uses_left -= 1
        if not value.dropped:
            continue
        if value.uncached or value.uses_left <= 0:
            value.tensor = None
        # A second backward through the same graph starts anew.
        if value.uses_left <= 0:
            value.uses_left = value.num_uses
            if value.uncached:
                stack += value.sources
