"""Calls of modules that are replayed as a whole: nothing that autograd saves within one is kept, and one more call of
the module gives all of it back in backward, as ``torch.utils.checkpoint`` does it by hand.

    forward    enter: notes the call, holds its arguments    pack: a number for each tensor    leave: lets go of them
    backward   the first tensor that is asked for: the call once more, up to the last one that was saved; then each
               tensor goes with its first use

No name is given to what is saved within, nothing is looked for in the graph, and no recipe is needed. The tensors
themselves stay until the call is over: then it is known whether the call could be told from a second one (see
:mod:`lightning_dpx.memory.execute.calls`), and if so they are kept.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.call_names import path_of
from lightning_dpx.memory.execute.calls import Call, never_unpacked, repeating
from lightning_dpx.memory.execute.compiled_calls import code_of, hook_compiled_call
from lightning_dpx.memory.execute.distributed_tensors import without_part
from lightning_dpx.memory.execute.module_anatomy import Anatomies, Passive
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.memory.execute.recorded_collectives import (
    AnswersCollectives,
    Collective,
    RecordsCollectives,
    needed,
    results_apart,
    sharing_memory,
)
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.write_checks import refuse
from lightning_dpx.torch_compat import (
    DisableTorchFunction,
    compiled_call_of,
    is_in_checkpoint,
    key_of,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    tree_leaves,
    version_counter,
)

_Wrap = Callable[[Any], Any]
_push = push_saved_tensors_hooks
_pop = pop_saved_tensors_hooks


class _EnoughError(BaseException):
    """All that is needed of a call has been made again; no handler of the user's code should take it for an error."""


class WholeCallReplay:
    """A call whose saved tensors are made again by calling its module once more.

    Args:
        call: Which.
        given: The tensors that it takes, in the order of its arguments.
        expected: How many tensors it will save, if it draws random numbers; -1 if it draws none, and ``None`` where
            that is not known.
        wrap: Applied to what autograd calls.

    Attributes:
        call: As given.
        saved: What autograd has saved within it, in order; empty once that is dropped.
        is_dropped: Whether it is, and is made again when backward needs it.
    """

    __slots__ = (
        "_again", "_changed", "_expected", "_given", "_lock", "_met", "_outputs", "_random", "_recorder", "_returned",
        "_sizes", "_stops", "_versions", "_wrap", "call", "is_dropped", "saved",
    )  # fmt: skip

    def __init__(
        self, call: Call, given: Sequence[torch.Tensor], expected: int | None = -1, wrap: _Wrap | None = None
    ) -> None:
        self.call: Call = call
        self._wrap = wrap or _as_it_is
        self._expected = expected
        self._stops = False
        self._lock = threading.RLock()  # backward has a thread per device
        self._random: int | None = None  # when the last tensor was saved
        self.saved: list[torch.Tensor] = []
        self.is_dropped: bool = False
        self._versions: list[int] = []
        self._given = [(tensor, version_counter(tensor)) for tensor in given]
        self._changed: Collection[int] = ()
        self._outputs: list[tuple[torch.Tensor, int]] = []
        self._returned: list[tuple[torch.Tensor, int, torch.Size]] = []
        self._sizes: list[int] = []
        self._again: list[torch.Tensor | None] | None = None
        self._recorder: RecordsCollectives | None = None
        self._met: list[Collective] = []

    @property
    def count(self) -> int:
        """The tensors that it has saved."""
        return len(self._versions)

    def pack(self, tensor: torch.Tensor) -> int:
        """Called by autograd when it saves a tensor within the call."""
        saved = self.saved
        saved.append(tensor)
        self._versions.append(version_counter(tensor))
        count = len(saved)
        # A replay ends with the last tensor, so the random numbers up to there are to be compared.
        # Which one is the last is known from earlier calls; until then each of them is noted.
        if self._expected is None or count == self._expected:
            self._random = self.call.draws.digest()
        return count - 1

    def record(self) -> None:
        """From now on what collectives give is kept, for other processes would not answer a replay."""
        self._recorder = RecordsCollectives(lambda: len(self.saved))
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def stop_recording(self) -> None:
        """The forward is over; its mode is the innermost one again."""
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._met = self._recorder.found
            self._recorder = None

    def keep(self) -> None:
        """All that was saved so far stays, and the call is not made again."""
        # Without their graphs: nodes in there hold the hooks, which hold this call, a cycle.
        self.saved = [tensor.detach() for tensor in self.saved]
        self._given = []
        self._met = []

    def left(self, output: Any) -> str:
        """The call is over: drops what was saved, or keeps it and says why."""
        saved = self.saved
        # Without its output: no value of the graph is picked from this call.
        self.call.left(None)
        why = self.call.obstacle
        if not why and any(version_counter(tensor) != version for tensor, version in self._given):
            why = "it changes what it is given"
        # After another number of tensors than expected, the state is not that of the last one.
        self._end_at(self._random if self._expected in (None, len(saved)) else None)
        if self._stops:
            self._met = needed(self._met, len(saved))
        why = why or next((each.obstacle for each in self._met if each.obstacle), "")
        if why:
            self.keep()
            return why
        # Likewise without their graphs.
        self._given = [(tensor.detach(), version) for tensor, version in self._given]
        # The call itself may write to what it has saved; it is an error only where backward asks
        # for such a tensor, as it is without a plan.
        now = [version_counter(tensor) for tensor in saved]
        if now != self._versions:
            self._changed = {at for at, version in enumerate(self._versions) if now[at] != version}
        self._sizes = [tensor.numel() for tensor in saved]
        if self.call.is_distributed:
            self._returned = _counters_of_shared(output, saved)
        else:
            self._outputs = _counters(output)
        self.saved = []
        # The last names of these here: from now on only others hold what the call has saved.
        del saved
        self._met = results_apart(self._met)
        self.is_dropped = True
        return ""

    def _end_at(self, random: int | None) -> None:
        """When it is made again it ends with the last tensor that was saved, where the state at that time is known."""
        self._stops = not self.call.draws.drew or random is not None
        if random is not None:
            self.call.draws.end_at(random)

    @classmethod
    def noted(
        cls,
        call: Call,
        given: Sequence[torch.Tensor],
        sizes: Sequence[int],
        random: int | None,
        met: Sequence[Collective] = (),
    ) -> "WholeCallReplay":
        """A call that has been watched by others, with the elements of what it saved, and what collectives gave."""
        replay = cls(call, given)
        replay.is_dropped = True
        replay._met = list(met)
        replay._sizes = list(sizes)
        replay._end_at(random)
        return replay

    def unpack(self, number: int) -> torch.Tensor:
        """Called by autograd when backward needs one of them."""
        # All tensors but the first are found here, without the lock: each is asked for by its own
        # node, in one thread.
        again = self._again
        if again is not None:
            tensor = again[number]
            if tensor is not None:
                again[number] = None
                return tensor
        with self._lock:
            if not self.is_dropped:
                return self._kept(number)
            if again is not None and self._again is not again:  # another thread was here first
                return self.unpack(number)
            if self._changed and number in self._changed:
                self._refuse(number)
            made = self.replay()
            tensor = made[number]
            again = [*made]
            again[number] = None  # the caller has it, and a backward asks once
            self._again = again
        return tensor

    def _kept(self, number: int) -> torch.Tensor:
        """A value of a call that could not be dropped."""
        tensor = self.saved[number]
        if version_counter(tensor) != self._versions[number]:
            refuse(tensor, self._versions[number], f"a tensor that {self.call.name!r} saves")
        return tensor.detach()

    def _refuse(self, number: int) -> None:
        raise RuntimeError(
            "One of the variables needed for gradient computation has been modified by an inplace operation: tensor "
            f"{number} of those that {self.call.name!r} saves, of {self._sizes[number]} elements."
        )

    def replay(self) -> list[torch.Tensor]:
        """What autograd saves when the call is made again.

        Raises:
            RuntimeError: what the call was given or has saved was written to, or it does something else now.
        """
        call = self.call
        count = len(self._sizes)
        found = list[torch.Tensor]()
        # All is checked here that autograd would check for tensors that it holds itself.
        for tensor, version in self._given:
            if version_counter(tensor) != version:
                refuse(tensor, version, f"an argument of {call.name!r}, which is called again,")
        # Of a call in which processes meet only outputs that it saves are known, as it cannot be made again to its end.
        for counter, version, shape in self._returned:
            if version_counter(counter) != version:
                refuse(counter, version, f"a tensor that {call.name!r} saves and returns", shape)
        # To find out whether what was written to is also saved takes the outputs of a whole call.
        stops = self._stops and not self._written()

        def catch(tensor: torch.Tensor) -> None:
            found.append(tensor.detach())
            if stops and len(found) == count:
                raise _EnoughError

        with (
            call.surroundings(),
            STEP_ASIDE.standing_in(),
            STEP_ASIDE.hooks(self._wrap(catch), never_unpacked),
            self._answering(),
        ):
            args, kwargs = call.arguments.with_tensors([tensor for tensor, _ in self._given])
            try:
                output = code_of(call.module)(*args, **kwargs)
            except _EnoughError:
                output = None
        self._check(found)
        if output is not None and self._written():
            self._refuse_written(found, output)
        return found

    def _answering(self) -> AbstractContextManager[Any]:
        """A context for a replay, in which no other process is asked."""
        if self.call.is_distributed:
            return AnswersCollectives(self.call.name, self._met)
        return nullcontext()

    def _check(self, found: Sequence[torch.Tensor]) -> None:
        """Refuses a call that has saved something else this time, by numbers of elements."""
        sizes = [tensor.numel() for tensor in found]
        if sizes != self._sizes:
            raise RuntimeError(
                f"{self.call.name!r} saved {len(sizes)} tensors of {sum(sizes)} elements when it was called again, "
                f"instead of {len(self._sizes)} of {sum(self._sizes)}: it does not do the same when it is called twice."
            )

    def _written(self) -> bool:
        """Whether what the call returned was written to."""
        return any(version_counter(counter) != version for counter, version in self._outputs)

    def _refuse_written(self, found: Sequence[torch.Tensor], output: Any) -> None:
        """Refuses it, as autograd does, if the call itself has saved that."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for leaf, (counter, version) in zip(outputs, self._outputs, strict=True):
            if version_counter(counter) == version:
                continue
            storage = key_of(leaf.untyped_storage())
            if any(key_of(tensor.untyped_storage()) == storage for tensor in found):
                refuse(counter, version, f"a tensor that {self.call.name!r} saves and returns", leaf.shape)


def _counters(output: Any) -> list[tuple[torch.Tensor, int]]:
    """What counts writes to each tensor in ``output``, without its memory, and the count so far."""
    counters = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            # A detached tensor shares the count of writes, also after its data were exchanged.
            counter = leaf.detach()
            if type(leaf) is torch.Tensor:
                counter.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            counters.append((counter, version_counter(leaf)))
    return counters


def _counters_of_shared(output: Any, saved: Collection[torch.Tensor]) -> list[tuple[torch.Tensor, int, torch.Size]]:
    """Likewise of what shares memory with a saved tensor, with the shape of each."""
    found = []
    for leaf in sharing_memory(tree_leaves(output), saved):
        found.append((without_part(leaf), version_counter(leaf), leaf.shape))
    return found


def _as_it_is(hook: Any) -> Any:
    return hook


class _Step:
    """A step under way.

    Attributes:
        calls: How often each module was called.
        running: Of the calls of modules with hooks that are under way, whether each is replayed; innermost last.
        replay: The one that is.
        outer: The hooks around it.
    """

    __slots__ = ("calls", "outer", "replay", "running")

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.running: list[bool] = []
        self.replay: WholeCallReplay | None = None
        self.outer: Any = None


class Replays:
    """The calls of a module that are replayed as a whole.

    Args:
        module: The root.
        names: Of the calls, such as ``"blocks.0"`` and ``"cell#2"``.
        alike: Paths of modules of which nothing is known and whose calls are replayed as well.

    Attributes:
        refused: Those that were kept after all, and why.
    """

    def __init__(self, module: nn.Module, names: Collection[str], alike: Collection[str] = ()) -> None:
        self.refused: dict[str, str] = {}
        self._alike = frozenset(alike)
        self._names = frozenset(names)
        self._anatomies = Anatomies()
        self._local = threading.local()
        self._handles: list[Any] = []
        self._drawn: dict[str, int] = {}  # tensors that calls have saved which draw random numbers
        parts = dict(module.named_modules())
        # What autograd calls within compiled code would be compiled as well.
        self._wrap: _Wrap = torch.compiler.disable if compiled_parts(module) else _as_it_is
        for path in dict.fromkeys([*(path_of(name) for name in names), *alike]):
            hooks = _Hooks(self, path)
            part = parts[path]
            if compiled_call_of(part) is not None:
                self._handles.append(hook_compiled_call(part, hooks, hooks.leave))
                continue
            # Last before the forward and first after it: a replay runs the forward, and no hooks.
            self._handles.append(part.register_forward_pre_hook(hooks, with_kwargs=True))
            self._handles.append(part.register_forward_hook(hooks.leave, prepend=True, always_call=True))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward passes in here drop what is saved within these calls; their backward may come later."""
        self._local.step = _Step()
        try:
            with STEP_ASIDE.standing_in():
                yield
        finally:
            step = self._local.step
            self._local.step = None
            # A call has ended without telling, as with Ctrl-C: what was saved since may be of others, so it stays.
            if step is not None and step.replay is not None:
                replay = step.replay
                self._stop(step, replay)
                replay.keep()

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module with hooks is called."""
        step: _Step | None = getattr(self._local, "step", None)
        if step is None or repeating():
            return
        number = step.calls[path] = step.calls.get(path, 0) + 1
        name = path if number == 1 else f"{path}#{number}"
        # Without gradients nothing is saved, and transforms of torch.func forbid hooks.
        is_on = torch.is_grad_enabled() and saved_tensors_hooks_enabled()  # type: ignore[attr-defined]
        # A region of torch.utils.checkpoint that makes the call again wants to see there what it sees now.
        is_on = is_on and not is_in_checkpoint()
        # Of nested calls the outer one is replayed, and runs the inner ones.
        wanted = step.replay is None and is_on and (name in self._names or path in self._alike)
        step.running.append(wanted and self._begin(step, name, module, args, kwargs))

    def _begin(self, step: _Step, name: str, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the call can be replayed; from here on it is watched."""
        # Function modes, such as a shift's, would take every look at a tensor for a use.
        with DisableTorchFunction():
            call = Call(module, name, args, kwargs, 0, self._anatomies)
            why = call.obstacle
            # What is compiled would run eagerly where operators are watched, and give other bits.
            if not why and call.is_distributed and self._wrap is not _as_it_is:
                why = "processes have parts of its parameters, and something is compiled"
            if why:
                self.refused[name] = why
                return False
            given = [argument.tensor() for argument in call.arguments.tensors]
        tensors = [tensor for tensor in given if tensor is not None]
        step.replay = replay = WholeCallReplay(call, tensors, self._drawn.get(name), self._wrap)
        # Pushed by hand: a context manager would have to be left in another function, the hook that
        # is called after the forward, and takes ten times as long.
        hooks = self._wrap(replay.pack), self._wrap(replay.unpack)
        step.outer = STEP_ASIDE.now
        _push(*hooks)
        STEP_ASIDE.are(hooks)
        if call.is_distributed:
            replay.record()
        return True

    def left(self, output: Any) -> None:
        """A module with hooks has returned this, or nothing after an error."""
        step: _Step | None = getattr(self._local, "step", None)
        if step is None or repeating() or not step.running:
            return
        is_replayed = step.running.pop()
        if is_replayed and step.replay is not None:
            self._leave(step, step.replay, output)

    def _stop(self, step: _Step, replay: WholeCallReplay) -> None:
        """A call is no longer watched."""
        step.replay = None
        replay.stop_recording()
        _pop()
        STEP_ASIDE.are(step.outer)

    def _leave(self, step: _Step, replay: WholeCallReplay, output: Any) -> None:
        self._stop(step, replay)
        with DisableTorchFunction():
            why = replay.left(output)
        if why:
            self.refused[replay.call.name] = why
        else:
            self._drawn[replay.call.name] = replay.count if replay.call.draws.drew else -1

    def remove(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._handles:
            handle.remove()


class _Hooks(Passive):
    """The hooks of one module; its copies, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, replays: Replays | None, path: str) -> None:
        self._replays = replays
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hooks, (None, self._path)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._replays is not None:
            self._replays.enter(self._path, module, args, kwargs)

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._replays is not None:
            self._replays.left(output)
