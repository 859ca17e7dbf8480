"""What is kept and what is computed again, value by value: frozen, readable, editable, and checked."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, get_args

import yaml  # type: ignore[import-untyped]

from lightning_dpx.errors import PlanError
from lightning_dpx.memory.call_names import path_of
from lightning_dpx.memory.plan.plan_file import format_file, read, write_whole
from lightning_dpx.notebook import html_table
from lightning_dpx.units import format_mib, unit_of_table

Action = Literal[
    "keep", "recompute", "recompute each time", "compress", "compress each time", "offload", "replay", "save less"
]  # fmt: skip
_VERSION = 1


class Model(Protocol):
    """What a plan is made for, as far as plans know it: a ``torch.nn.Module``."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Names, and what has a shape and a dtype."""

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        """Paths, and parts."""


@dataclass(frozen=True, slots=True)
class Decision:
    """About one value that backward needs, or about all that is saved within a module call.

    Attributes:
        name: Of a call (``"blocks.0"``), where it is about that; else the module call that first saves the value
            (``"blocks.0.norm"``, ``"cell#2"`` for the second call), a colon, and its number there.
        operator: The autograd node that produced it; empty for what does not come from the graph.
        num_bytes: Its size.
        seconds: To compute it again from its inputs, or its share of a module call that is made again for it and
            others; where it is offloaded, what of its copies nothing hides.
        action: ``"keep"``; ``"recompute"``; ``"recompute each time"``: it does not stay even where the recomputation
            of another value comes by and it will be needed again; ``"compress"`` and ``"compress each time"``, for a
            mask; ``"offload"``: it rests in the host's memory; ``"replay"``, for a call: it is made again as a
            whole; for a value: with a call; ``"save less"``, for a compiled part: its code saves a share of what it
            would, and computes the rest again.
        calls: The module calls that are made again for a value, where no operator can be repeated for it, or none is.
        share: Of the bytes that a compiled part would save by itself, those that it may save: 0 to 1.
    """

    name: str
    operator: str
    num_bytes: int
    seconds: float
    action: Action
    calls: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def module(self) -> str:
        """The path of the module."""
        return module_of(self.name)


def module_of(name: str) -> str:
    """The path of the module that a value, or a call, with this name is of."""
    # The name of a call has no colon.
    call, colon, _ = name.rpartition(":")
    return (call if colon else name).partition("#")[0]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The decisions for one model and what they lead to.

    Attributes:
        model: The class of the model.
        fingerprint: Of the names and shapes of its parameters.
        planner: Who decided.
        budget: Bytes of activations that were allowed; ``None`` for as few as possible.
        unplanned_peak: Bytes of activations at the most without a plan.
        peak: With it, predicted; ``None`` after an edit, which makes the prediction void.
        saved_bytes: Of activations that are kept from forward to backward; ``None`` likewise.
        recompute_share: Extra time as a share of a step, predicted; ``None`` likewise.
        least_share: What every plan for this budget costs at least; see solvers/bounds.py and solvers/milp_model.py.
        decisions: One for every value.
        prefetch_depth: How many offloaded values are on their way beside the computation, in each direction; with 0 the
            device waits for every copy.
        basis: What the figures rest on, if not on a step that was run and measured.
        micro_batches: Into how many micro-batches a step is cut, each of which follows the decisions. Extra times are
            those of all of them together over a step in one piece.
        micro_batch_rows: Rows of the largest of them; 0 where the step is not cut.
        units: Paths of the sharded parts within which values are made again, with spaces between; see sharding.py.
        recipes: Those of the user's that values are made again by, with digests; see :func:`register_recipe`.
        adding_peak: Bytes of activations at the most in a step whose backward finds gradients and adds to them, if the
            plan was made for one that finds none; else ``None``.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> plan = dpx.search_plan(net, torch.ones(64, 64), budget=0.7, progress=False)
        >>> plan.save("plan.yaml")
        >>> dpx.MemoryPlan.load("plan.yaml") == plan
        True
    """

    model: str
    fingerprint: str
    planner: str
    budget: int | None
    unplanned_peak: int
    peak: int | None
    saved_bytes: int | None
    recompute_share: float | None
    least_share: float | None
    decisions: tuple[Decision, ...]
    prefetch_depth: int = 0
    basis: str = ""
    micro_batches: int = 1
    micro_batch_rows: int = 0
    units: str = ""
    recipes: str = ""
    adding_peak: int | None = None

    def names(self, *actions: Action) -> frozenset[str]:
        """The values with one of these actions."""
        return frozenset(decision.name for decision in self.decisions if decision.action in actions)

    @property
    def dropped(self) -> frozenset[str]:
        """The values that are not kept as they are."""
        return self.names("recompute", "compress", "offload") | self.uncached

    @property
    def uncached(self) -> frozenset[str]:
        """The dropped values that are forgotten after every use."""
        return self.names("recompute each time", "compress each time")

    @property
    def replayed(self) -> frozenset[str]:
        """The module calls that are made again for everything that is saved within them."""
        # A decision about a value that comes back with a call has that action as well, and names
        # the call.
        return frozenset(d.name for d in self.decisions if d.action == "replay" and not d.calls)

    @property
    def shares(self) -> dict[str, float]:
        """The compiled parts that save less, with the share that each may save."""
        return {decision.name: decision.share for decision in self.decisions if decision.action == "save less"}

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is computed again, offloaded or compressed."""
        return not self.dropped and not self.replayed and not self.shares

    @property
    def num_recomputed(self) -> int:
        """How many decisions have something computed again; a value that comes back with a call is none of its own."""
        again = [decision for decision in self.decisions if decision.action not in ("keep", "offload")]
        # Values that come back with a call are counted once, by the decision about the call.
        return sum(not (decision.action == "replay" and decision.calls) for decision in again)

    @property
    def calls(self) -> frozenset[str]:
        """The module calls that are made again."""
        again = self.names("recompute", "recompute each time")
        calls = set[str]()
        for decision in self.decisions:
            if decision.name in again:
                calls.update(decision.calls)
        return frozenset(calls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as YAML, one line per value, to be read, edited and loaded again.

        A file that is there already is replaced by the whole new one, or stays as it is.

        Raises:
            PlanError: the plan could not be loaded again; says why.
            OSError: nothing can be written there.
        """
        # Before the file is touched: a plan that is there already is worth more than one that
        # nobody can load.
        _check_sound(self, str(path))
        comments = [
            "Which activations are kept from forward to backward, and which are computed again.",
            f"action: {', '.join(get_args(Action))}",
        ]
        try:
            text = format_file(comments, _head_of(self), map(_row_of, self.decisions))
        except ValueError as error:
            raise PlanError(f"The plan cannot be saved in {path}: {error}.") from error
        write_whole(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MemoryPlan":
        """Reads a plan.

        Raises:
            PlanError: the file is not a plan, or not a whole one; says what is wrong with it.
        """
        try:
            content = read(path)
        # PyYAML recurses with the nesting of a file, which may be any file.
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise PlanError(f"{path} cannot be read as a plan: {error}") from error
        return from_mapping(content, str(path))

    def check(self, module: Model) -> None:
        """Whether the plan belongs to ``module``.

        Raises:
            PlanError: the module has other parameters, or lacks a part that the plan names.
        """
        # Before any name is looked for: a model of another width has all of them.
        fingerprint = fingerprint_of(module)
        if self.fingerprint != fingerprint:
            raise PlanError(
                f"The plan was made for a {self.model} with parameters {self.fingerprint}, and this "
                f"{type(module).__name__} has {fingerprint}. Make a new plan for it."
            )
        paths = {path for path, _ in module.named_modules()}
        for decision in self.decisions:
            named = [decision.module]
            named += [path_of(call) for call in decision.calls]
            for path in named:
                if path not in paths:
                    raise PlanError(f"The plan names {decision.name!r}, but the model has no module {path!r}.")

    def with_actions(self, actions: Mapping[str, Action]) -> "MemoryPlan":
        """A copy with other actions for some values; its predictions are void.

        Raises:
            PlanError: the plan has no such value.
        """
        unknown = set(actions) - {decision.name for decision in self.decisions}
        if unknown:
            known = ", ".join(repr(decision.name) for decision in self.decisions[:3])
            raise PlanError(f"The plan has no value {min(unknown)!r}; it has {known or 'none'} and so on.")
        # What was predicted, and proved for the same budget, was so for the actions before.
        changed = tuple(replace(d, action=actions.get(d.name, d.action)) for d in self.decisions)
        return replace(self, decisions=changed, **_VOID)

    def _repr_html_(self) -> str:
        """What a notebook shows: the peaks, and of each module what is dropped."""
        rows = []
        largest_first = sorted(_rows(self), key=lambda row: row[2], reverse=True)
        unit, num_bytes_of_unit = _unit_of(largest_first)
        for name, count, num_bytes, seconds in largest_first:
            rows.append((name, str(count), f"{num_bytes / num_bytes_of_unit:.2f}", f"{seconds * 1e3:.3f}"))
        return html_table(summary(self), ("module", "values", f"saves {unit}", "costs ms"), rows)


def to_mapping(plan: MemoryPlan) -> dict[str, Any]:
    """What a file of the plan holds, as lists, texts, numbers and ``None`` by name."""
    return {**_head_of(plan), "decisions": [_row_of(decision) for decision in plan.decisions]}


def from_mapping(content: Any, path: str) -> MemoryPlan:
    """The plan of a file with this content.

    Args:
        content: As :func:`to_mapping` gives it.
        path: Where it comes from, for errors.

    Raises:
        PlanError: it is no plan; says what is wrong with it.
    """
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise PlanError(f"{path} is not a plan of version {_VERSION}: it begins with {str(content)[:60]!r}.")
    rows = content.get("decisions")
    if not isinstance(rows, list):
        raise PlanError(f"{path} has no list of decisions.")
    decisions = tuple(_decision(row, f"{path}, decision {number}") for number, row in enumerate(rows, start=1))
    # A file that was cut off after a line is a plan still, and would keep all that is missing.
    expected = content.get("num_decisions", len(decisions))  # what older files lack
    if expected != len(decisions):
        raise PlanError(
            f"{path} lists {len(decisions)} decisions, and num_decisions is {expected!r}: lines are missing. Load "
            'another file; where lines were taken out on purpose, leave them in with "action: keep".'
        )
    _check_names(decisions, path)
    # A misspelled field would silently leave the right one as older files have it.
    unknown = [field for field in content if field not in (*_HEAD, *_BESIDE)]
    if unknown:
        raise PlanError(f"{path}: {unknown[0]!r} is no field of a plan; the fields are {', '.join(_HEAD)}.")
    head: dict[str, Any] = {}
    for field, kinds in _HEAD.items():
        head[field] = content.get(field, _OF_BEFORE.get(field))
        if not isinstance(head[field], kinds) or not _is_sound_in_head(field, head[field]):
            raise PlanError(f"{path}: {field}={head[field]!r} is not allowed.")
    plan = MemoryPlan(**head, decisions=decisions)
    # Actions may be edited by hand; the figures in the file are about those before.
    if content.get("checksum") != _checksum(plan):
        plan = replace(plan, **_VOID)
    return plan


_VOID: dict[str, Any] = {
    "peak": None, "saved_bytes": None, "recompute_share": None, "least_share": None, "adding_peak": None,
}  # fmt: skip
_NUMBER = (int, float)
_BESIDE = ("version", "num_decisions", "checksum", "decisions")
_OF_BEFORE: dict[str, Any] = {  # what older files lack
    "prefetch_depth": 0, "basis": "", "micro_batches": 1, "micro_batch_rows": 0, "units": "", "recipes": "",
    "adding_peak": None,
}  # fmt: skip
_HEAD: dict[str, Any] = {
    "model": str, "fingerprint": str, "planner": str, "budget": (int, type(None)), "unplanned_peak": int,
    "peak": (int, type(None)), "saved_bytes": (int, type(None)), "recompute_share": (*_NUMBER, type(None)),
    "least_share": (*_NUMBER, type(None)), "prefetch_depth": int, "basis": str,
    "micro_batches": int, "micro_batch_rows": int, "units": str, "recipes": str,
    "adding_peak": (int, type(None)),
}  # fmt: skip


def _check_names(decisions: Sequence[Decision], path: str) -> None:
    for name, times in Counter(decision.name for decision in decisions).items():
        if times > 1:
            raise PlanError(f"{path} decides twice about {name!r}.")


def _check_sound(plan: MemoryPlan, path: str) -> None:
    """Refuses what could not be loaded again."""
    _check_names(plan.decisions, path)
    for decision in plan.decisions:
        for field in ("num_bytes", "seconds"):
            if not _is_sound(getattr(decision, field)):
                raise PlanError(f"{path}: {field}={getattr(decision, field)!r} of {decision.name!r} is not allowed.")
        if decision.action not in get_args(Action):
            raise PlanError(f"{path}: action={decision.action!r} of {decision.name!r} is not allowed.")
        if not _is_share(decision.share):
            raise PlanError(f"{path}: share={decision.share!r} of {decision.name!r} is not allowed.")
    for field in _HEAD:
        if not _is_sound_in_head(field, getattr(plan, field)):
            raise PlanError(f"{path}: {field}={getattr(plan, field)!r} is not allowed.")


def _head_of(plan: MemoryPlan) -> dict[str, Any]:
    head = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "decisions"}
    return {"version": _VERSION, **head, "num_decisions": len(plan.decisions), "checksum": _checksum(plan)}


def _row_of(decision: Decision) -> dict[str, Any]:
    row = {name: getattr(decision, name) for name in _FIELDS}
    # A whole number would be written without the point by which a line is read quickly.
    row["seconds"] = float(decision.seconds)
    if decision.calls:
        row["calls"] = decision.calls
    if decision.share != 1:
        row["share"] = float(decision.share)
    return row


_OPTIONAL = ("calls", "share")
_FIELDS = [field.name for field in fields(Decision) if field.name not in _OPTIONAL]


def _decision(row: Any, where: str) -> Decision:
    """A decision from a line of a file; ``where`` that is, for errors."""
    if not isinstance(row, dict) or row.keys() - {*_OPTIONAL} != set(_FIELDS):
        raise PlanError(f"{where} must have exactly {', '.join(_FIELDS)}; it is {row!r}.")
    if row["action"] not in get_args(Action):
        raise PlanError(f"{where}: action={row['action']!r} is not allowed; give one of {', '.join(get_args(Action))}.")
    for field, kinds in (("name", str), ("operator", str), ("num_bytes", int), ("seconds", _NUMBER)):
        if not isinstance(row[field], kinds) or not _is_sound(row[field]):
            raise PlanError(f"{where}: {field}={row[field]!r} is not allowed.")
    calls = row.get("calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, str) for call in calls):
        raise PlanError(f"{where}: calls={calls!r} is not allowed; give a list of names of module calls.")
    share = row.get("share", 1.0)
    if not isinstance(share, _NUMBER) or not _is_share(share):
        raise PlanError(f"{where}: share={share!r} is not allowed; give a number from 0 to 1.")
    return Decision(**{**row, "calls": tuple(calls), "share": share})


def _is_share(value: float) -> bool:
    return not isinstance(value, bool) and 0 <= value <= 1


def _is_sound(value: Any) -> bool:
    """Whether it is a text, ``None``, or a number that can be a size or a time."""
    if isinstance(value, bool):  # a number to Python
        return False
    if not isinstance(value, int | float):
        return True
    return 0 <= value < float("inf")  # neither holds for NaN


def _is_sound_in_head(field: str, value: Any) -> bool:
    """Whether it is what that field of a plan can be; a step runs in one piece at least."""
    return _is_sound(value) and (field != "micro_batches" or value >= 1)


def _checksum(plan: MemoryPlan) -> str:
    """Changes with what a step does under the plan, and with nothing else that a file holds."""
    text = "\n".join(f"{decision.name} {decision.action}" for decision in plan.decisions)
    for name, share in plan.shares.items():
        text += f"\n{name} saves {float(share)!r}"
    # Left out where a plan does without, so that files from before these fields keep their figures.
    if plan.prefetch_depth:
        text += f"\noverlap {plan.prefetch_depth}"
    if plan.micro_batches > 1:
        text += f"\nmicro-batches {plan.micro_batches}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint_of(module: Model) -> str:
    """Changes with the names, shapes and dtypes of the parameters."""
    lines = [f"{name} {list(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def format_plan(plan: MemoryPlan, most_rows: int = 24) -> str:
    """A table for people: of each module what is dropped, if anything, what that saves and costs; then the peaks."""
    rows = list(_rows(plan))
    # A table without rows would say less than the peaks alone.
    if not rows:
        return summary(plan)
    shown = sorted(rows, key=lambda row: row[2], reverse=True)[:most_rows]
    names = {row[0] for row in shown}
    unit, num_bytes = _unit_of(rows)
    lines = [f"{'module':40} {'values':>7} {f'saves {unit}':>10} {'costs ms':>9}"]
    # The largest are shown, in the order of the model.
    for name, count, size, seconds in rows:
        if name in names:
            lines.append(f"{name[:40]:40} {count:7} {size / num_bytes:10.2f} {seconds * 1e3:9.3f}")
    if len(rows) > len(shown):
        rest = [row for row in rows if row[0] not in names]
        count = sum(row[1] for row in rest)
        size = sum(row[2] for row in rest)
        seconds = sum(row[3] for row in rest)
        name = f"({len(rest)} smaller ones)"
        lines.append(f"{name:40} {count:7} {size / num_bytes:10.2f} {seconds * 1e3:9.3f}")
    return "\n".join([*lines, summary(plan)])


def describe_cut(plan: MemoryPlan) -> str:
    """What is done with a step: ``"4 micro-batches of 6 rows, 3 values recomputed: 1.06 x"``, times a plain one."""
    pieces = "one piece"
    if plan.micro_batches > 1:
        plural = "" if plan.micro_batch_rows == 1 else "s"
        pieces = f"{plan.micro_batches} micro-batches of {plan.micro_batch_rows} row{plural}"
    number = plan.num_recomputed
    plural = "" if number == 1 else "s"
    recomputed = f"{number or 'no'} value{plural} recomputed"
    time = "" if plan.recompute_share is None else f": {1 + plan.recompute_share:.2f} x"
    return f"{pieces}, {recomputed}{time}"


def summary(plan: MemoryPlan) -> str:
    """The peaks and the price, in one line."""
    budget = "as few as possible" if plan.budget is None else f"{format_mib(plan.budget)}"
    basis = f"; {plan.basis}" if plan.basis else ""
    cut = f"{describe_cut(plan)}; " if plan.micro_batches > 1 else ""
    if plan.peak is None or plan.recompute_share is None:
        return (
            f"{cut}activations: an edited plan, peak unknown; without a plan {format_mib(plan.unplanned_peak)}{basis}"
        )
    least = "" if plan.least_share is None else f", no plan costs less than {plan.least_share:.1%}"
    if plan.least_share:  # over a bound of nothing there is no ratio
        least += f", a gap of {max(0.0, plan.recompute_share / plan.least_share - 1):.1%}"
    sizes = [decision.num_bytes for decision in plan.decisions if decision.action == "offload"]
    offloaded = f", {format_mib(sum(sizes))} offloaded to the host" if sizes else ""
    return (
        f"{cut}activations: peak {format_mib(plan.peak)} of {format_mib(plan.unplanned_peak)} without a plan, "
        f"budget {budget}, extra time {plan.recompute_share:.1%} of a step{offloaded} ({plan.planner}{least}){basis}"
    )


def _unit_of(rows: Sequence[tuple[str, int, int, float]]) -> tuple[str, int]:
    return unit_of_table(max((size for _, _, size, _ in rows), default=0), 2)


def _rows(plan: MemoryPlan) -> Iterator[tuple[str, int, int, float]]:
    """For each module that has something dropped: path, number of decisions, bytes, seconds."""
    modules: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        # The bytes of a value that comes back with a call are those of the call already.
        if decision.action != "keep" and not (decision.action == "replay" and decision.calls):
            modules.setdefault(decision.module or "(the step itself)", []).append(decision)
    for name, decisions in modules.items():
        yield name, len(decisions), sum(d.num_bytes for d in decisions), sum(d.seconds for d in decisions)
