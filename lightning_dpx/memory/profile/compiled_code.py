"""What compiled code really takes and saves, in the place of what its operators do one by one.

A step is profiled operator by operator, uncompiled. Compiled code fuses operators and chooses what to save; here a step
runs once as it is, with the allocator's account taken round every compiled call, forward and backward, and the
profile gets those bytes:

    bytes   eager    __/''\\__ ... __/'\\__          compiled    __/'\\__ ... __/'\\__
                     call    kept   backward                   call   kept  backward
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.compiled_calls import hook_compiled_call
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.memory.profile.data import Profile, SavedCall
from lightning_dpx.memory.tracing.allocator_account import Account, Taken, account_of
from lightning_dpx.python_objects.untouched import untouched
from lightning_dpx.torch_compat import compiled_call_of, key_of, tree_leaves

_BACKWARD = "CompiledFunctionBackward"


@dataclass(slots=True)
class _Seen:
    """A compiled call of a step.

    Attributes:
        forward: Bytes at the most while it runs, beyond those that were there before.
        saved: Bytes of what it saves and was not given.
        backward: Bytes at the most while its backward runs, beyond those that were there before and without first
            gradients of parameters; -1 if not known.
        gradients: Bytes of each of those gradients.
    """

    gradients: Sequence[int]
    forward: int = 0
    saved: int = 0
    backward: int = -1
    _started: list[int] = field(default_factory=list)

    def start(self, account: Account) -> None:
        self._started.append(account.start())

    def stop(self, account: Account) -> Taken:
        return account.stop(self._started.pop())


class _CompiledCalls:
    """Watches the compiled calls of ``module`` on ``device``.

    Attributes:
        seen: By the name of the call.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, accumulates: bool) -> None:
        self.seen: dict[str, _Seen] = {}
        self._account = account_of(device)
        self._running: _Seen | None = None
        self._numbers: dict[str, int] = {}
        tensors = [*module.parameters(), *module.buffers()]
        # Keys of storages that live as long as they are here: backward must find nothing held that it would let go.
        self._known = {key_of(tensor.untyped_storage()) for tensor in tensors}
        self._given: set[int] = set()
        parts = dict(module.named_modules())
        self._handles: list[Any] = []
        for path in compiled_parts(module):
            # The first gradients that a backward makes stay, and are no activations; where it adds
            # to earlier ones, its own are gone at its end and count.
            gradients: list[int] = []
            if not accumulates:
                for parameter in parts[path].parameters():
                    if parameter.requires_grad:
                        gradients.append(parameter.nbytes)
            enter = partial(self._enter, path, gradients)
            # module.compile() compiles the call with its hooks; torch.compile(module) leaves them
            # outside.
            if compiled_call_of(parts[path]) is not None:
                self._handles.append(hook_compiled_call(parts[path], enter, self._leave))
            else:
                self._handles.append(parts[path].register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(parts[path].register_forward_hook(self._leave, always_call=True))

    def watch(self, step: Callable[[], None]) -> None:
        """Runs a step."""
        # What autograd calls within compiled code would be compiled as well.
        pack: Any = torch.compiler.disable(self._pack)  # type: ignore[no-untyped-call]
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is):
                step()
        finally:
            for handle in self._handles:
                handle.remove()

    def _enter(self, path: str, gradients: Sequence[int], _module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self._numbers[path] = self._numbers.get(path, 0) + 1
        # By the names that CallNames gives to calls.
        self._running = seen = self.seen[path if number == 1 else f"{path}#{number}"] = _Seen(gradients)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._given = {key_of(tensor.untyped_storage()) for tensor in given if tensor.layout is torch.strided}
        seen.start(self._account)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        seen = self._running
        self._running = None
        if seen is None:
            return
        seen.forward = seen.stop(self._account).most
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        nodes = {leaf.grad_fn for leaf in outputs if leaf.grad_fn is not None}
        # Code in one piece has one node for all of its outputs, round whose backward the account
        # can be taken; of a call that was compiled in several pieces nothing is known.
        if [node.name() for node in nodes] == [_BACKWARD]:
            (node,) = nodes
            node.register_prehook(partial(self._before, seen))
            node.register_hook(partial(self._after, seen))

    def _before(self, seen: _Seen, _gradients: Any) -> None:
        seen.start(self._account)

    def _after(self, seen: _Seen, _given: Any, _taken: Any) -> None:
        seen.backward = most_without(seen.stop(self._account), seen.gradients)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._running is None or tensor.layout is not torch.strided:
            return tensor
        key = key_of(tensor.untyped_storage())
        # What is known or given is there anyway; a storage counts with its first tensor.
        if key not in self._known and key not in self._given:
            self._known.add(key)
            self._running.saved += tensor.untyped_storage().nbytes()
        return tensor


def most_without(taken: Taken, gradients: Sequence[int]) -> int:
    """The most bytes of a backward at once, without blocks that stay and are as large as one of ``gradients``."""
    # The account knows blocks by their sizes only: one that stays and has the size of a gradient
    # is taken for it.
    left = Counter(gradients)
    out: Counter[int] = Counter()
    for size, _ in taken.until_each_stays():
        if left[size]:
            left[size] -= 1
            out[size] += 1
    if not out:
        return max(0, taken.most)
    live = most = 0
    for size in taken.blocks:
        if size > 0 and out[size]:
            out[size] -= 1
            continue
        live += size
        most = max(most, live)
    return most


def with_compiled_code(
    profile: Profile,
    module: nn.Module,
    step: Callable[[], None],
    device: torch.device,
    *,
    accumulates: bool,
) -> Profile:
    """``profile`` with what the compiled calls that may be replayed really take and save.

    Args:
        profile: Of the uncompiled step.
        module: What runs.
        step: A forward and its backward, which leave no trace; what is not compiled yet, is.
        device: Whose memory.
        accumulates: Whether backward adds to gradients that are there, and its own are gone afterwards.
    """
    watch = _CompiledCalls(module, device, accumulates=accumulates)
    with untouched(module):
        watch.watch(step)
    curve = list(profile.curve)
    calls = list(profile.calls)
    for number, call in enumerate(calls):
        if call.name in watch.seen:
            calls[number] = _corrected(profile, number, watch.seen[call.name], curve)
    return replace(profile, curve=tuple(curve), calls=tuple(calls))


def _corrected(profile: Profile, number: int, seen: _Seen, curve: list[int]) -> SavedCall:
    """The call with what its compiled code takes; ``curve``, bytes at every event, is changed."""
    call = profile.calls[number]
    holds = [hold for hold in profile.holds if hold.call == number and hold.asked >= 0]
    asked = min((hold.asked for hold in holds), default=len(curve))
    over = max((hold.end for hold in holds), default=len(curve))
    # Nothing that compiled code saves has a name, so all of it counted as small so far.
    more = seen.saved - call.small
    for event in range(call.end, asked):
        curve[event] += more
    before = curve[call.begin - 1] if call.begin else 0
    for event in range(call.begin, call.end):
        curve[event] = before + seen.forward
    if asked < len(curve):
        curve[asked] = curve[asked - 1]
    if seen.backward >= 0:
        for event in range(asked + 1, over):
            curve[event] = curve[asked] + seen.backward
    return replace(call, small=seen.saved, most=seen.forward)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
