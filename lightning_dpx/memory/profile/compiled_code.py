"""What compiled code really takes and saves, in the place of what its operators do one by one.

A step is profiled operator by operator, uncompiled. Compiled code fuses operators and chooses what to save; here a step
runs once as it is, with the allocator's account taken round every compiled call, forward and backward, and the
profile gets those bytes. It runs again with compiled parts that save less, which is what a plan may choose:

    bytes   eager    __/''\\__ ... __/'\\__          compiled    __/'\\__ ... __/'\\__
                     call    kept   backward                   call   kept  backward
"""

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.devices import clock_of, is_host, synchronize
from lightning_dpx.memory.execute.compiled_calls import hook_compiled_call, uncompiled_of
from lightning_dpx.memory.execute.module_calls import OF_CODE, CallNames, do_nothing
from lightning_dpx.memory.execute.recompiled_parts import RecompiledParts
from lightning_dpx.memory.profile.code_runs import curve_of_runs
from lightning_dpx.memory.profile.data import CodeRun, CompiledCall, Profile, SavedCall
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory, account_of
from lightning_dpx.python_objects.leave_no_trace import untouched
from lightning_dpx.torch_compat import (
    compiled_call_of,
    hook_compiled_function,
    key_of,
    nodes_of_graph,
    nodes_so_far,
    number_of,
    tree_leaves,
)

_Step = Callable[[Callable[[torch.Tensor], None]], None]
_BACKWARD = "CompiledFunctionBackward"
_SHARES = (0.0, 0.75, 0.5, 0.25)  # that compiled parts are tried with; the least first, as it tells whether any does
_ROUNDING = 1e-3  # of the largest element of a gradient; other masks of a dropout make a tenth and more
_LOG = logging.getLogger("lightning_dpx")
_TIMED = 3  # steps with each share


@dataclass(slots=True)
class _Seen:
    """A compiled call of a step.

    Attributes:
        gradients: Bytes of each of the first gradients of parameters.
        kind: Equal for calls of equal code.
        begin: Bytes that are there when it begins, beyond those when the first such call does.
        end: Bytes that are there when it is over, beyond those.
        forward: Bytes at the most while it runs, beyond those that were there before.
        stays: Bytes that are still there when the next such call begins, beyond those; of the last, when it is over.
        saved: Bytes of what it saves and was not given.
        backward: Bytes at the most while its backward runs, beyond those that were there before and without first
            gradients of parameters; -1 if not known.
        seconds: Of both.
    """

    gradients: Sequence[int]
    kind: Any = None
    begin: int = 0
    end: int = 0
    forward: int = 0
    stays: int = 0
    saved: int = 0
    backward: int = -1
    seconds: float = 0.0


class _Bytes:
    """What comes and goes between moments of a step.

    The account of the host must end where it began: both outside of autograd's nodes, or both in the same.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._account = account_of(device)
        self._started: Any = None

    def begin(self) -> None:
        """The first moment."""
        self._started = self._account.start()

    def end(self) -> OperatorMemory:
        """The last moment: what was taken since the one before; nothing if there was none."""
        started, self._started = self._started, None
        if started is None:
            return OperatorMemory()
        return self._account.stop(started)


class _Seconds:
    """The time between two moments of a step.

    Args:
        device: Where it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._last = 0.0

    def begin(self) -> None:
        """The first moment."""
        synchronize(self._device)
        self._last = self._clock()

    def end(self) -> float:
        """The last moment: seconds since the one before."""
        synchronize(self._device)
        return self._clock() - self._last


class _CompiledCalls:
    """Watches the compiled calls of ``module`` on ``device``: their bytes, or their times.

    Args:
        module: What runs.
        names: Tell what is compiled in it.
        device: Where.
        accumulates: Whether backward adds to gradients that are there.
        count: How many calls there are in a step, if it is to watch bytes.

    Attributes:
        seen: By the name of the call.
    """

    def __init__(
        self, module: nn.Module, names: CallNames, device: torch.device, *, accumulates: bool, count: int = 0
    ) -> None:
        self.seen: dict[str, _Seen] = {}
        self._bytes = _Bytes(device)
        self._seconds = _Seconds(device)
        self._count = count
        self._live = 0
        self._running: _Seen | None = None
        self._left: _Seen | None = None  # the last call, until the next begins
        self._numbers: dict[str, int] = {}
        self._parameters = list(module.parameters())
        tensors = [*self._parameters, *module.buffers()]
        # Keys of storages that live as long as they are here: backward must find nothing held that it would let go.
        self._known = {key_of(tensor.untyped_storage()) for tensor in tensors}
        self._given: set[int] = set()
        self._handles: list[Any] = []
        self._root: _Seen | None = None
        parts = dict(module.named_modules())
        for path in sorted(names.compiled):
            # The first gradients that a backward makes stay, and are no activations; where it adds
            # to earlier ones, its own are gone at its end and count.
            gradients: list[int] = []
            if not accumulates:
                for parameter in parts[path].parameters():
                    if parameter.requires_grad:
                        gradients.append(parameter.nbytes)
            self._hook(path, parts[path], gradients)
        self._accumulates = accumulates
        self._ranges: list[tuple[int, int, _Seen]] = []  # the first node that a function makes, and the next
        # Where all of the step is one code, they are in it.
        for function, _ in names.functions if self._root is None else ():
            self._handles.append(hook_compiled_function(function, self._enter_function))

    def _hook(self, path: str, part: nn.Module, gradients: Sequence[int]) -> None:
        if not path:
            # All of the step is in its code, or right behind it.
            self._root = self.seen[path] = _Seen(gradients)
            return
        enter = partial(self._enter, path, gradients)
        # module.compile() compiles the call with its hooks; torch.compile(module) leaves them
        # outside.
        if compiled_call_of(part) is not None:
            self._handles.append(hook_compiled_call(part, enter, self._leave))
        else:
            self._handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._leave, always_call=True))

    def watch(self, step: _Step) -> dict[str, _Seen]:
        """Runs a step, and gives what was seen."""
        # What autograd calls within compiled code would be compiled as well.
        pack: Any = torch.compiler.disable(self._pack)  # type: ignore[no-untyped-call]
        # Those of the step before would go within this one.
        for parameter in self._parameters:
            parameter.grad = None
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is):
                if self._root is not None:
                    self._before(self._root, None)
                step(self._find_backwards)
                if self._root is not None:
                    self._after(self._root, None, None)
        finally:
            self._bytes.end()
            for handle in self._handles:
                handle.remove()
        return self.seen

    def _enter(self, path: str, gradients: Sequence[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self._numbers[path] = self._numbers.get(path, 0) + 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._given = {key_of(tensor.untyped_storage()) for tensor in given if tensor.layout is torch.strided}
        # By the names that CallNames gives to calls.
        seen = self._begin(path if number == 1 else f"{path}#{number}", gradients)
        seen.kind = type(uncompiled_of(module))

    def _begin(self, name: str, gradients: Sequence[int]) -> _Seen:
        self._running = seen = self.seen[name] = _Seen(gradients)
        if self._count:
            self._live += self._bytes.end().stays  # nothing before the first of all
            seen.begin = self._live
            if self._left is not None:
                self._left.stays = self._live - self._left.begin
            self._bytes.begin()
        else:
            self._seconds.begin()
        return seen

    def _enter_function(self) -> Callable[[], None]:
        # Within other code it is a part of that.
        if self._running is not None:
            return do_nothing
        self._given = set()
        self._begin(f"{OF_CODE}{len(self._ranges)}", [])
        return partial(self._leave_function, nodes_so_far())

    def _leave_function(self, first: int) -> None:
        seen = self._end()
        if seen is not None:
            self._ranges.append((first, nodes_so_far(), seen))

    def _find_backwards(self, result: torch.Tensor) -> None:
        """Watches the backwards of functions, whose outputs nobody has shown, in the graph of ``result``."""
        found: list[list[Any]] = [[] for _ in self._ranges]
        for node in nodes_of_graph([result.grad_fn]) if self._ranges else ():
            for nodes, (first, end, _) in zip(found, self._ranges, strict=True):
                if first <= number_of(node) < end:
                    nodes.append(node)
        for nodes, (_, _, seen) in zip(found, self._ranges, strict=True):
            self._watch_backward(nodes, seen)
            if not self._accumulates:
                leaves = [getattr(node, "variable", None) for each in nodes for node, _ in each.next_functions]
                seen.gradients = [leaf.nbytes for leaf in leaves if leaf is not None]

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        seen = self._end()
        if seen is None:
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._watch_backward({leaf.grad_fn for leaf in outputs if leaf.grad_fn is not None}, seen)

    def _end(self) -> _Seen | None:
        """The running call is over; gives it, if one was running."""
        seen = self._running
        self._running = None
        if seen is None:
            return None
        if self._count:
            taken = self._bytes.end()
            self._live += taken.stays
            seen.forward, seen.end = taken.most, self._live
            seen.stays = taken.stays
            self._left = seen
            # What is between calls is watched, too, but not what comes behind the last: that goes on
            # into backward.
            if len(self.seen) < self._count:
                self._bytes.begin()
        else:
            seen.seconds += self._seconds.end()
        return seen

    def _watch_backward(self, nodes: Collection[Any], seen: _Seen) -> None:
        # Code in one piece has one node for all of its outputs, round whose backward the account
        # can be taken; of a call that was compiled in several pieces nothing is known.
        if [node.name() for node in nodes] == [_BACKWARD]:
            (node,) = nodes
            node.register_prehook(partial(self._before, seen))
            node.register_hook(partial(self._after, seen))

    def _before(self, _seen: _Seen, _gradients: Any) -> None:
        if self._count:
            self._bytes.begin()
        else:
            self._seconds.begin()

    def _after(self, seen: _Seen, _given: Any, _taken: Any) -> None:
        if self._count:
            seen.backward = most_without(self._bytes.end(), seen.gradients)
        else:
            seen.seconds += self._seconds.end()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._running is None or tensor.layout is not torch.strided:
            return tensor
        key = key_of(tensor.untyped_storage())
        # What is known or given is there anyway; a storage counts with its first tensor.
        if key not in self._known and key not in self._given:
            self._known.add(key)
            self._running.saved += tensor.untyped_storage().nbytes()
        return tensor


class _Trials:
    """Runs a step of a module with compiled parts, again and again.

    Args:
        module: What runs.
        names: Tell what is compiled in it.
        step: A forward and its backward; what it is given is told of the result of the forward in between.
        device: Whose memory.
        accumulates: Whether backward adds to gradients that are there.
    """

    def __init__(
        self,
        module: nn.Module,
        names: CallNames,
        step: _Step,
        device: torch.device,
        *,
        accumulates: bool,
    ) -> None:
        self._module = module
        self._step = step
        self._device = device
        self._accumulates = accumulates
        self._names = names

    def by_share(self) -> dict[float, dict[str, _Seen]]:
        """What was seen of every call, by the share that its part was allowed; 1 is as it is."""
        found = {1.0: self._bytes(1.0)}
        expected = self._gradients()
        # Functions are compiled as they are.
        for share in _SHARES if self._names.compiled else ():
            seen = self._bytes(share)
            gradients = self._gradients()
            # What saves no less with the least share does not with others either, and every trial compiles.
            if all(_bytes_of(each) == _bytes_of(found[1.0][name]) for name, each in seen.items()):
                break
            # Torch draws random numbers anew where it computes dropout again on the host.
            if not _are_close(gradients, expected):
                _LOG.info(
                    "dpx: compiled parts that save %.0f%% give other gradients, and no plan has them so.", 100 * share
                )
                continue
            found[share] = seen
        # In turns, as a machine that is slow for a while is slow for all of them.
        times: dict[float, list[dict[str, _Seen]]] = {share: [] for share in found}
        for _ in range(_TIMED if len(found) > 1 else 0):
            for share, rounds in times.items():
                with self._sharing(share):
                    rounds.append(self._watch())
        for share, rounds in times.items():
            _note_seconds(found[share], rounds)
        return found

    @contextmanager
    def _sharing(self, share: float) -> Iterator[None]:
        code = RecompiledParts(self._module, dict.fromkeys(self._names.compiled, share) if share < 1 else {})
        try:
            yield
        finally:
            code.remove()

    def _bytes(self, share: float) -> dict[str, _Seen]:
        with self._sharing(share):
            seen = self._watch()  # what is not compiled yet, is
            return self._watch(count=len(seen))

    def _watch(self, *, count: int = 0) -> dict[str, _Seen]:
        watch = _CompiledCalls(self._module, self._names, self._device, accumulates=self._accumulates, count=count)
        devices = [] if is_host(self._device) else [self._device]
        # The same random numbers in every step, or gradients could not be compared.
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            torch.manual_seed(0)
            return watch.watch(self._step)

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in self._module.parameters()]
        return [gradient.detach().clone() for gradient in gradients if gradient is not None]


def _are_close(gradients: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same up to the rounding of other kernels, against the largest element of each."""
    if len(gradients) != len(expected):
        return False
    for one, other in zip(gradients, expected, strict=True):
        if one.layout is not torch.strided or not one.numel():
            continue
        tolerance = max(_ROUNDING, 16 * torch.finfo(one.dtype).eps) * float(other.abs().max())
        if not float((one - other).abs().max()) <= tolerance:
            return False
    return True


def _note_seconds(seen: dict[str, _Seen], rounds: Sequence[dict[str, _Seen]]) -> None:
    kinds: dict[Any, list[_Seen]] = {}
    for name, each in seen.items():
        each.seconds = min((timed[name].seconds for timed in rounds), default=0.0)
        kinds.setdefault((each.kind, *_bytes_of(each)), []).append(each)
    # One of them may have been hit by whatever else the machine did; equal parts are to have equal prices.
    for alike in kinds.values():
        typical = statistics.median_low([each.seconds for each in alike])
        for each in alike:
            each.seconds = typical


def _bytes_of(seen: _Seen) -> tuple[int, int, int]:
    return seen.forward, seen.stays, seen.backward


def most_without(taken: OperatorMemory, gradients: Sequence[int]) -> int:
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
    lasting = set[int]()
    # What stays came late, so of blocks of one size the last ones are left out.
    for at in range(len(taken.blocks) - 1, -1, -1):
        size = taken.blocks[at]
        if size > 0 and out[size]:
            out[size] -= 1
            lasting.add(at)
    live = most = 0
    for at, size in enumerate(taken.blocks):
        if at not in lasting:
            live += size
            most = max(most, live)
    return most


def with_compiled_code(
    profile: Profile,
    module: nn.Module,
    names: CallNames,
    step: _Step,
    device: torch.device,
    *,
    accumulates: bool,
) -> Profile:
    """``profile`` with what compiled calls really take, and what they would take if they saved less.

    Args:
        profile: Of the uncompiled step.
        module: What runs.
        names: Tell what is compiled in it.
        step: A forward and its backward, which leave no trace; what is not compiled yet, is. What it is given is told
            of the result of the forward in between.
        device: Whose memory.
        accumulates: Whether backward adds to gradients that are there, and its own are gone afterwards.
    """
    with untouched(module):
        by_share = _Trials(module, names, step, device, accumulates=accumulates).by_share()
    itself = by_share[1.0]
    curve = np.array(profile.curve, dtype=np.int64)
    spans: Sequence[CompiledCall] = profile.codes
    if "" in itself:  # compiled as a whole: one call from beginning to end
        spans = [CompiledCall("", 0, 0, 0, len(curve))]
        curve[0] = 0
    codes = []
    for span in spans:
        if span.name in itself:
            codes.append(replace(span, runs=_runs(span.name, by_share)))
    curve = _measured(curve, codes, itself)
    calls = _calls_of_code(profile.calls, itself)
    return replace(profile, curve=tuple(curve.tolist()), calls=calls, codes=tuple(codes))


def _calls_of_code(calls: Sequence[SavedCall], seen: Mapping[str, _Seen]) -> tuple[SavedCall, ...]:
    """``calls`` with what compiled ones save and take, also within others."""
    found = list(calls)
    for number, call in enumerate(calls):
        each = seen.get(call.name)
        if each is None:
            continue
        found[number] = replace(call, small=each.saved, most=each.forward)
        more = each.saved - call.small
        # A replay of what is around it runs this code, and has what it saves in place of what its operators save.
        around = call.parent
        while around >= 0:
            outer = found[around]
            found[around] = replace(outer, small=max(0, outer.small + more), most=max(0, outer.most + more))
            around = outer.parent
    return tuple(found)


def _measured(curve: np.ndarray, calls: Sequence[CompiledCall], seen: Mapping[str, _Seen]) -> np.ndarray:
    """The bytes of the uncompiled step, ``curve``, as they are with compiled calls."""
    moments: list[tuple[int, int]] = []  # event, and how many bytes more are there
    start = int(curve[calls[0].begin]) - seen[calls[0].name].begin if calls else 0
    for call in calls:
        each = seen[call.name]
        moments.append((call.begin, start + each.begin - int(curve[call.begin])))
        moments.append((call.end, start + each.end - int(curve[call.end])))
    # When backward comes to a call, there is what was there when the next one began.
    after = [more for _, more in moments[2::2]] + [more for _, more in moments[-1:]]
    moments += [(call.asked, more) for call, more in zip(calls, after, strict=True)]
    moments.sort()
    more = np.zeros(len(curve), dtype=np.int64)
    for (event, here), (later, there) in pairwise(moments):
        more[event] = here
        # What goes between the two may do so at its beginning or at its end.
        more[event + 1 : later] = max(here, there) if later <= calls[-1].end else there
    if moments:
        more[moments[-1][0]] = moments[-1][1]
    return curve_of_runs(curve + more, calls, [call.runs[0] for call in calls], [call.runs[0].stays for call in calls])


def _runs(name: str, by_share: Mapping[float, Mapping[str, _Seen]]) -> tuple[CodeRun, ...]:
    """How a call runs with each share, the largest first; only as it is where its backward cannot be told."""
    runs: list[CodeRun] = []
    # Of functions no plan says anything.
    for share in [1.0] if name.startswith(OF_CODE) else sorted(by_share, reverse=True):
        seen = by_share[share][name]
        if runs and (seen.backward < 0 or _bytes_of(seen) == (runs[-1].forward, runs[-1].stays, runs[-1].backward)):
            continue
        runs.append(CodeRun(share, *_bytes_of(seen), seen.seconds))
    return tuple(runs)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
