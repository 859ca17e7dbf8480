"""Metric objects on replicas: all replicas share the user's own, and one call of all replicas is one call of it.

A metric need not be additive: ``RunningMean`` counts its updates, ``BootStrapper`` draws random numbers in each,
``MinMaxMetric`` compares values of whole batches. So the states of copies are never merged. During a step the metric's
methods collect what every replica gives them, and the user's metric is called once with the joined arguments, in the
order of the rows: ``update`` and ``reset``, which return nothing, after the step; ``forward`` and ``compute``, whose
value the step may use, where the replicas meet in them. Only the user ever resets a metric. Micro-batches do not meet
in ``forward`` where their own values, merged, are those of one device; see ``slice_values``.
"""

import copy
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection, MetricTracker, MinMetric

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.metrics.arguments import (
    LARGEST,
    MEAN,
    SMALLEST,
    SUM,
    Arguments,
    JoinRules,
    JoinSettings,
    join_calls,
    learn_calls,
)
from lightning_dpx.lightning.metrics.slice_values import SliceMetrics
from lightning_dpx.lightning.metrics.values import SharedValue, shared_value
from lightning_dpx.python_objects.overrides import Overrides
from lightning_dpx.python_objects.reachable import reachable
from lightning_dpx.replicas import BatchSlice, ReplicaRank, current_rank
from lightning_dpx.replicas.caller_context import CallerContext
from lightning_dpx.torch_compat import tree_leaves, tree_map, tree_map_only

KINDS = (Metric, MetricCollection, MetricTracker)
DEFERRED = ("update", "reset", "increment", "reset_all")  # they return nothing
MOVES = ("to", "cuda", "cpu")  # they return the metric
AT_ONCE = ("forward", "compute", "compute_all", "best_metric")  # they return a value
_IN_WORDS = {
    MEAN: "their mean over the rows",
    SUM: "their sum",
    LARGEST: "the largest of them",
    SMALLEST: "the smallest of them",
}


MetricStates = list[tuple[Any, dict[str, Any]]]  # metrics, each with what it holds


@dataclass(frozen=True, slots=True)
class _Call:
    """One replica's call of a method."""

    metric: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _DeferredCall(_Call):
    """A call that waits for the end of the step, and the modes in which it was made."""

    context: CallerContext


class _Routed:
    """Stands before a method of a metric during a step, as an attribute of the metric.

    What else a step asks of the method, such as its name or what a wrapper has set on it, is the method's own.
    """

    # Names that no method has an attribute of.
    __slots__ = ("_routed_by", "_routed_metric", "_routed_name", "_routed_own")

    def __init__(self, metric: nn.Module, method: str, route: Callable[..., Any]) -> None:
        self._routed_metric = metric
        self._routed_name = method
        self._routed_own: Any = getattr(metric, method)
        self._routed_by = route

    def __getattr__(self, name: str) -> Any:
        # An object that copy() has made, but not filled yet, has nothing to ask.
        if name in _Routed.__slots__:
            raise AttributeError(name)
        return getattr(self._routed_own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _Routed.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._routed_own, name, value)

    @property
    def __signature__(self) -> inspect.Signature:
        # Else its ``__code__`` would be asked, which knows nothing of what the method is bound to.
        return inspect.signature(self._routed_own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._routed_by(_Call(self._routed_metric, self._routed_name, args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A metric that a step clones is the step's own."""
        clone = memo.get(id(self._routed_metric), self._routed_metric)
        return types.MethodType(getattr(type(clone), self._routed_name), clone)


@dataclass(slots=True)
class _Step:
    """What the replicas have called in the step that is under way.

    Attributes:
        slices: The slices, in the order of their ranks.
        counts: Per replica, how often each method was called.
        pending: Per replica, calls that wait, by metric, method and number.
        values: What the metrics gave to the replicas; their storage is held, so that no other has its address.
        before: The metrics' states before the first call that did not wait for the end of the step.
    """

    slices: Sequence[BatchSlice]
    counts: list[dict[tuple[int, str], int]]
    pending: list[dict[tuple[int, str, int], _DeferredCall]]
    values: dict[int, Tensor] = field(default_factory=dict)
    before: "MetricStates | None" = None


class ReplicaMetrics:
    """The metric objects of a module, which all its replicas share.

    Args:
        module: The user's module.
        number: Whether a number that each replica gives is a ``"mean"`` over its rows or part of a ``"sum"``.
        searches: Whether the module may lead to metrics as it is.

    Attributes:
        modules: The submodules at the last look.
        named: The metrics by path, nested ones, too.
        dim: The batch dim to look for first in what metrics are given.
        separate: Why, in the last step, calls were made once per replica, as one device would not have made them.
        example: What one device gave its metrics on the rows of the step that is under way, where that is known: how
            arguments are joined is learned from it.
        gives_slices: Whether ``forward`` gives each replica the value of its own slice.
    """

    def __init__(self, module: nn.Module, number: str = "mean", *, searches: bool = True) -> None:
        self._module = module
        self._number = number
        self.dim = 0
        self._routes = Overrides()
        self.modules: Sequence[nn.Module] = ()
        self._rules: dict[tuple[int, str], JoinRules] = {}
        self._step: _Step | None = None
        self._announced: set[str] = set()
        self.named: dict[str, nn.Module] = {}
        self.separate: list[str] = []
        self.example: CallLog | None = None
        self.gives_slices = False
        self._of_slices = SliceMetrics()
        if searches:
            self.find()

    def __bool__(self) -> bool:
        return bool(self.named)

    def find(self) -> None:
        """Looks for metrics: submodules, and those in attributes, containers, helper objects and globals."""
        self.named = dict(reachable(self._module, KINDS))

    def find_new(self, modules: Sequence[nn.Module]) -> list[str]:
        """Looks again; the paths of those that the module holds and that are new.

        What only code leads to, a global, is the same object for all replicas.

        Args:
            modules: The submodules, as :meth:`refresh` takes them.
        """
        before = self.named  # held meanwhile, so that no new one has the id of one that is gone
        self.modules = modules
        self.find()
        new = {id(metric) for metric in self.named.values()} - {id(metric) for metric in before.values()}
        if not new:
            return []
        held = reachable(self._module, KINDS, follow_code=False)
        return [path for path, metric in held if id(metric) in new]

    def refresh(self, modules: Sequence[nn.Module]) -> None:
        """Looks again if the module's submodules, a list that stays the same otherwise, are not those of before."""
        # To look for metrics walks everything that the module leads to.
        if modules is not self.modules:
            self.modules = modules
            self.find()

    def is_whole(self, value: Any) -> bool:
        """Whether a metric gave ``value`` in this step, so that it is that of the whole batch on every replica."""
        if self._step is None or not isinstance(value, Tensor) or not value.numel():
            return False
        # By memory: what a step logs may be detached or viewed, and so another object. Empty
        # tensors have no memory, hence no address of their own.
        return value.data_ptr() in self._step.values

    @contextmanager
    def step(self, slices: Sequence[BatchSlice], *, restore: bool = False) -> Iterator[None]:
        """What the replicas call inside the block is called once on the user's metrics.

        Args:
            slices: The slices of the step, in the order of their ranks.
            restore: After an error the metrics are what they were, because the step may be repeated.
        """
        if not self.named:
            yield
            return
        # A copy of all states, which may be every row of an epoch, so only where it may be needed.
        before = self._snapshot(_copied_throughout) if restore else None
        self.separate = []
        step = _Step(slices, [{} for _ in slices], [{} for _ in slices])
        self._step = step
        try:
            with self._routed():
                yield
            self._call_pending(step)
        except BaseException as error:
            self._step = None
            # What the slices return cannot be put together, so the step runs again on the whole batch.
            if before is None and isinstance(error, GatherError):
                before = step.before
            if before is not None:
                put_back(before)
            raise

    def end_step(self) -> None:
        """Forgets the step, once what it logged has been merged."""
        self._step = None

    @contextmanager
    def kept(self, slices: Sequence[BatchSlice]) -> Iterator[None]:
        """Calls of replicas inside the block go on as always; metrics are put back afterwards."""
        before = self._snapshot(_copied_throughout)
        try:
            with self.step(slices):
                yield
        finally:
            self._step = None
            put_back(before)

    def rules_by_path(self) -> dict[tuple[str, str], JoinRules]:
        """How arguments are joined, by the path of the metric and the method."""
        paths = {id(metric): path for path, metric in self.named.items()}
        return {(paths[key], method): rules for (key, method), rules in self._rules.items() if key in paths}

    def take_rules(self, rules: Mapping[tuple[str, str], JoinRules]) -> None:
        """From now on arguments are joined as others have learned, who had the same metrics at these paths."""
        for (path, method), learned in rules.items():
            if (metric := self.named.get(path)) is not None:
                self._rules[id(metric), method] = learned

    # ---- routing ----

    @contextmanager
    def _routed(self) -> Iterator[None]:
        self._install()
        try:
            yield
        finally:
            self._routes.put_back()

    def _install(self) -> None:
        for metric in self.named.values():
            for method in (*DEFERRED, *MOVES, *AT_ONCE):
                # Not every kind of metric has all of these methods.
                if getattr(type(metric), method, None) is not None:
                    self._routes.set(metric, method, _Routed(metric, method, self._route))

    def _route(self, call: _Call) -> Any:
        """A call of a metric's method: by itself, or within a step, where several replicas make it.

        What returns nothing waits for the end of the step (``DEFERRED``, and ``MOVES``); what returns a value is called
        at once, with what all replicas give (``AT_ONCE``).
        """
        rank = current_rank()
        step = self._step
        if rank is None or step is None:
            return self._call_own(call.metric, call.method, (call.args, call.kwargs))
        key = id(call.metric), call.method
        # The n-th call of a replica belongs to the n-th calls of the others.
        number = step.counts[rank.rank].get(key, 0)
        step.counts[rank.rank][key] = number + 1
        # A value of its own slice waits for no other, so that micro-batches run one by one.
        is_of_slice = call.method == "forward" and self.gives_slices
        if call.method in AT_ONCE and not is_of_slice:
            return self._call_at_once(call, number, rank, step)
        # The step may go on to change in place what it gave away.
        args, kwargs = tree_map_only(Tensor, _copied, (call.args, call.kwargs))
        # Hooks on what autograd saves, as those of a plan, are for the step's own operators.
        context = replace(CallerContext.capture(), saved_tensor_hooks=None)
        step.pending[rank.rank][*key, number] = _DeferredCall(call.metric, call.method, args, kwargs, context)
        if is_of_slice:
            device = step.slices[rank.rank].replica.device
            return self._of_slices.value(call.metric, device, call.args, call.kwargs)
        if call.method in MOVES:
            return call.metric
        return None

    def _call_own(self, metric: Any, method: str, arguments: Arguments) -> Any:
        """The method of the user's metric, with everything as it is outside a step."""
        # A metric calls methods of its own, and collections those of others: these calls must not
        # be collected again.
        args, kwargs = arguments
        routed = bool(self._routes)
        self._routes.put_back()
        try:
            return getattr(metric, method)(*args, **kwargs)
        except Exception as error:
            error.add_note(f"In {method} of the metric {self._name(metric)} ({type(metric).__name__}).")
            raise
        finally:
            if routed:
                self._install()

    def _call_pending(self, step: _Step) -> None:
        """After the step, or before a value is computed in it: what the replicas called without waiting for it."""
        # In the order of the calls, those of the first replica first.
        keys = dict.fromkeys(chain.from_iterable(step.pending))
        for key in keys:
            calls = {rank: pending.pop(key) for rank, pending in enumerate(step.pending) if key in pending}
            first = next(iter(calls.values()))
            # A step may update in inference mode of its own, and a state that was made in it is written in no other.
            with first.context.entered():
                self._call_joined(calls, key[2], step)

    def _call_joined(self, calls: Mapping[int, _Call], number: int, step: _Step) -> None:
        """The ``number``-th call of a method in a step, once for all replicas."""
        first = next(iter(calls.values()))
        try:
            arguments = self._joined(calls, number, step)
        except GatherError as error:
            # Better counted by slice than not at all; the stage gets whole batches
            # from here on.
            self._note_separate(first.metric, first.method, str(error))
            for rank, call in calls.items():
                self._call_own(first.metric, first.method, self._at_home(call, step.slices[rank]))
        else:
            self._call_own(first.metric, first.method, arguments)

    def _call_at_once(self, call: _Call, number: int, rank: ReplicaRank, step: _Step) -> Any:
        # Updates that wait come first, since a value must have them. Replicas that do not call it
        # are not missed.
        def act(present: list[tuple[int, _Call]]) -> SharedValue:
            if step.before is None:
                step.before = self._states_of_now()
            self._call_pending(step)
            shared = shared_value(
                {rank: self._at_home(one, step.slices[rank]) for rank, one in present},
                lambda arguments: self._join(call, number, arguments, step),
                lambda arguments: self._call_own(call.metric, call.method, arguments),
                # None, torchmetrics' default, says nothing; only False does.
                differentiable=getattr(call.metric, "is_differentiable", None) is not False,
            )
            if shared.separate:
                self._note_separate(call.metric, call.method, shared.separate)
            return shared

        kind = f"{call.method}() of the metric {self._name(call.metric)}"
        whole: SharedValue = rank.meet_present(kind, (rank.rank, call), act)
        value = whole.for_replica(rank, step.slices[rank.rank].replica.device, (call.args, call.kwargs))
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.numel():
                step.values[leaf.data_ptr()] = leaf.detach()
        return value

    # ---- arguments ----

    def _joined(self, calls: Mapping[int, _Call], number: int, step: _Step) -> Arguments:
        one = next(iter(calls.values()))
        arguments = {rank: self._at_home(call, step.slices[rank]) for rank, call in calls.items()}
        return self._join(one, number, arguments, step)

    def _join(self, call: _Call, number: int, arguments: dict[int, Arguments], step: _Step) -> Arguments:
        """Those of the ``number``-th call of a method in a step, by rank."""
        rows = tuple(step.slices[rank].num_rows for rank in arguments)
        if len(rows) == 1:
            return next(iter(arguments.values()))
        metric = call.metric
        method = call.method
        parts = list(arguments.values())
        rules = self._rules.setdefault((id(metric), method), JoinRules())
        settings = JoinSettings(rows=rows, dim=self.dim, number=self._number, extreme=_extreme_of(metric))
        if self.example is not None:
            # The rehearsal has run the same rows as one device, which tells the rule.
            given = self.example.calls.get((self._name(metric), method, number))
            if given is not None:
                learn_calls(given, parts, settings, rules)
        joined = join_calls(parts, settings, rules)
        for path, rule in rules.guessed.items():
            self._tell(f"{self._name(metric)}.{method}() gets numbers of the replicas at {path} as {_IN_WORDS[rule]}")
        return joined

    def _at_home(self, call: _Call, batch_slice: BatchSlice) -> Arguments:
        """What a replica gives, on the device of the user's module where it is on the replica's."""
        home: Any = self._module.device
        there = batch_slice.replica.device
        if there == home:
            return call.args, call.kwargs

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                # What the step has put on the host stays there, as it would on one device.
                if leaf.device == there:
                    return leaf.to(home)
                return leaf
            is_there = isinstance(leaf, torch.device | str) and call.method in MOVES and torch.device(leaf) == there
            if is_there:
                return home
            return leaf

        args, kwargs = tree_map(move, (call.args, call.kwargs))
        return args, kwargs

    def _name(self, metric: Any) -> str:
        return next((path for path, known in self.named.items() if known is metric), type(metric).__name__)

    def _tell(self, text: str) -> None:
        if text not in self._announced:
            rank_zero_info(f"dpx: {text}.")
        self._announced.add(text)

    def _note_separate(self, metric: Any, method: str, why: str) -> None:
        name = f"{self._name(metric)}.{method}()"
        self.separate.append(
            f"What the replicas gave to {name} cannot be joined, so it was called once for each: {why}"
        )

    def _states_of_now(self) -> MetricStates:
        """All states, of which lists are not copied item by item: they may hold an epoch, and only grow in a step."""
        self._routes.put_back()
        found = self._snapshot(_copied_outside)
        self._install()
        return found

    def _snapshot(self, copied: Callable[[Any], Any]) -> MetricStates:
        return states_of(self.named.values(), copied)


@dataclass(slots=True)
class CallLog:
    """What the metrics of a module were given in a step: arguments by path, method and number of the call."""

    calls: dict[tuple[str, str, int], Any] = field(default_factory=dict)


@contextmanager
def recorded_calls(metrics: Mapping[str, nn.Module]) -> Iterator[CallLog]:
    """Notes every call of the outermost of ``metrics``, given by path, which go on as always."""
    log = CallLog()
    depth = [0]
    counts: dict[tuple[str, str], int] = {}
    routes = Overrides()

    def route(path: str, own: Callable[..., Any], call: _Call) -> Any:
        # forward() calls update() itself, and a collection its members: one call of the
        # user's is noted.
        if depth[0] == 0:
            number = counts.get((path, call.method), 0)
            counts[path, call.method] = number + 1
            arguments = tree_map_only(Tensor, _copied, (call.args, call.kwargs))
            log.calls[path, call.method, number] = arguments
        depth[0] += 1
        try:
            return own(*call.args, **call.kwargs)
        finally:
            depth[0] -= 1

    for path, metric in metrics.items():
        for method in ("update", "forward"):
            own = getattr(metric, method)
            routes.set(metric, method, _Routed(metric, method, partial(route, path, own)))
    try:
        yield log
    finally:
        routes.put_back()


def _extreme_of(metric: Any) -> str:
    """The rule by which ``metric`` takes its values together where that is an extreme; empty otherwise."""
    if isinstance(metric, MaxMetric):
        return LARGEST
    return SMALLEST if isinstance(metric, MinMetric) else ""


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copied_throughout(value: Any) -> Any:
    return tree_map_only(Tensor, _copied, value)


def _copied_outside(value: Any) -> Any:
    """A copy of a tensor, or of a list or dict with the very items that it has."""
    if isinstance(value, Tensor):
        return _copied(value)
    if isinstance(value, list | dict):
        return copy.copy(value)
    return value


def states_of(metrics: Iterable[Any], copied: Callable[[Any], Any] = _copied_throughout) -> MetricStates:
    """All that ``metrics`` hold, in copies."""
    found = []
    for metric in metrics:
        found.append((metric, {key: copied(value) for key, value in vars(metric).items()}))
    return found


def put_back(before: MetricStates) -> None:
    """Gives the metrics back what they held."""
    for metric, attributes in before:
        kept = {key: vars(metric)[key] for key in ("_parameters", "_buffers")}  # others hold them, too
        held: dict[str, Any] = metric.__dict__
        held.clear()
        held.update({**attributes, **kept})
