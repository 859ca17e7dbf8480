"""A mode in which random numbers are the same for every row, so that slices can be compared with the whole batch.

Dropout and noise draw a number for each element; a slice would draw others than the whole batch. In this mode what is
drawn depends on the last dim only: every row of the batch gets the same mask and the same noise, however it is cut.
Draws that mix rows (permutations, choices among them) are left alone, and noted.

Where all rows draw alike, a mean over what was drawn (masked tokens, kept rows) is one over rows. So rows can also draw
like the rows at their places in other slices, and no others:

    slices of 3 and 2    a b c | a b        one device    a b c a b

Rows are those of dim 0 unless runs have shown that they lie elsewhere in what is drawn (`drawn_rows.py`).

The mode also keeps the shadows from writing what they share with the real module: before an operator writes a
parameter, its values are put aside.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.replicas.drawn_rows import DrawnRows
from lightning_dpx.torch_compat import COLLECTIVES, TorchDispatchMode, overload_name, schema_of, tree_leaves

_SEEDS = 2**31 - 1
_MASKS = frozenset({"native_dropout", "bernoulli", "bernoulli_"})  # operators that draw one
_CHOICES = "multinomial.default"
_DROPOUTS = frozenset(
    {"dropout_p", "dropout", "train", "training"}
)  # arguments with which an operator may draw nothing


class Draw(NamedTuple):
    """One call of an operator that draws.

    Attributes:
        numbers: How many it has drawn.
        is_mask: Whether they are a mask, as dropout draws it: by design slices have their own, also of what belongs to
            the whole batch (embeddings of relative positions, weights).
    """

    numbers: int
    is_mask: bool = False


class CollectiveInRehearsal(Exception):  # noqa: N818  ends a rehearsal, and is no fault of the step
    """The step calls ``torch.distributed`` itself; other processes may not be where this one is."""


class SharedParameters:
    """Parameters whose storage shadows share, with the values of those that a step wrote.

    Args:
        parameters: The real ones.
        buffers: Those of the real module, which no shadow shares: a step may still come to them.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        parameters = list(parameters)
        # By memory: a step may write a view of a parameter, or a tied one. Two of them may be views of one memory, each
        # of another part, and replicas on one device have the same ones.
        self._by_storage: dict[tuple[str, int], dict[Any, tuple[str, torch.Tensor]]] = {}
        for name, tensor in (*parameters, *buffers):
            if tensor.layout == torch.strided and tensor.numel():
                part = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
                self._by_storage.setdefault(_storage(tensor), {}).setdefault(part, (name, tensor))
        self._of_parameters = {_storage(tensor) for _, tensor in parameters if tensor.layout == torch.strided}
        self._saved: dict[tuple[str, int], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}

    @property
    def written(self) -> list[str]:
        """Names of the parameters that were written."""
        return [saved[0][0] for key, saved in self._saved.items() if key in self._of_parameters]

    @property
    def written_buffers(self) -> list[str]:
        """Names of the buffers that were written, and are no views of parameters."""
        return [saved[0][0] for key, saved in self._saved.items() if key not in self._of_parameters]

    def before_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write ``tensor``."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        key = _storage(tensor)
        # The first write alone: later ones find what the step has made of it.
        if key in self._by_storage and key not in self._saved:
            held = self._by_storage[key].values()
            self._saved[key] = [(name, one, one.detach().clone()) for name, one in held]

    def restore(self) -> None:
        """All parameters hold what they held, to the bit."""
        for saved in self._saved.values():
            for _, tensor, values in saved:
                # Through .data, which no version counts: the parameters are what they were for all who
                # ask.
                tensor.data.copy_(values)
        self._saved.clear()


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    try:
        return str(tensor.device), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper around other tensors has no storage
        return "", 0


class SameDraws(TorchDispatchMode):
    """Draws the same numbers for every row, as the module's docstring explains.

    Args:
        shared: What must not be written without a copy.
        sizes: Rows of each slice, where rows of a slice draw each its own; all rows draw alike unless given.
        rows: Shapes of what is drawn for rows that do not lie in dim 0, or not one by one.
        parts: Into how many parts the places of a row may be divided, which lie apart; one where they are together.

    Attributes:
        shapes: Of what the step drew and was made equal.
        draws: Of what the step drew and was made equal for all rows: how many numbers a row got, draw by draw. Where
            rows are counted by the last dim, they are as many as rows, and no equals.
        places: Of the same draws, for how many rows each drew by its place in a slice; 0 where all rows drew alike.
        left_alone: Operators that drew numbers which could not be.
        on_host: What was drawn from the host's generator.
        on_devices: What was drawn from the generators of other devices.
        dtypes: What the results of its operators are made of.
    """

    def __init__(
        self, shared: SharedParameters, sizes: Sequence[int] = (), rows: Sequence[DrawnRows] = (), parts: int = 1
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._pattern = _Pattern(sizes, rows, parts)
        self.shapes: list[tuple[int, ...]] = []
        self.draws: list[int] = []
        self.places: list[int] = []
        self.on_host: list[Draw] = []
        self.on_devices: list[Draw] = []
        self.left_alone: dict[str, None] = {}
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVES:
            raise CollectiveInRehearsal(str(func))
        if schema_of(func).is_mutable:
            for index, argument in enumerate(schema_of(func).arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[index] if index < len(args) else kwargs.get(argument.name)
                    self._before_write(written)
        # torch's own mark of operators that draw numbers.
        if torch.Tag.nondeterministic_seeded not in func.tags or has_dropout_off(func, args, kwargs):
            result = func(*args, **kwargs)
            # The dtypes of a step decide how far its slices may be from the whole batch.
            results = result if isinstance(result, list | tuple) else [result]
            for value in results:
                if isinstance(value, torch.Tensor):
                    self.dtypes.add(value.dtype)
            return result
        name = f"{func.overloadpacket.__name__}.{overload_name(func)}"
        # With one list of probabilities it chooses among rows, or for all of them.
        draw = None if name == _CHOICES and args[0].ndim == 1 else _DRAWS.get(name)
        if draw is None:
            # In inference mode operators come here that consist of others, such as dropout, which draws nothing when
            # it is off.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            # A dict, for its order: the first to be named is the first that drew.
            self.left_alone[str(func.overloadpacket)] = None
            result = func(*args, **kwargs)
            # The first is what was drawn for: others may be a seed, or packed weights, of one size for all rows.
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._note_draw(func, tensors[:1])
            return result
        result = draw(self._pattern, func, args, kwargs)
        # native_dropout also returns its mask.
        drawn = result[0] if isinstance(result, tuple) else result
        self._note_draw(func, [drawn] if isinstance(drawn, torch.Tensor) else [])
        layout = self._pattern.layout_of(drawn)
        self.shapes.append(tuple(drawn.shape))
        self.draws.append(layout.numbers_per_row)
        self.places.append(layout.num_rows)
        return result

    def _note_draw(self, func: Any, drawn: Iterable[torch.Tensor]) -> None:
        for tensor in drawn:
            draws = self.on_host if is_host(tensor.device) else self.on_devices
            draws.append(Draw(tensor.numel(), is_mask=func.overloadpacket.__name__ in _MASKS))

    @property
    def drew(self) -> bool:
        """Whether the step drew numbers that were made equal for all rows."""
        return bool(self.draws)

    def _before_write(self, written: Any) -> None:
        is_list = isinstance(written, list | tuple)
        tensors = written if is_list else [written]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            self._shared.before_write(tensor)
            # Inside of a mode torch (2.13) leaves the versions of a list's tensors alone, as clip_grad_norm_ writes.
            if is_list and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def has_dropout_off(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator would draw for its dropout alone, as attention does, and there is none."""
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.name in _DROPOUTS:
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if given == 0:
                return True
    return False


class _Layout(NamedTuple):
    """How the numbers of a draw are made from fewer ones.

    Attributes:
        shape: Of those, which are expanded.
        dim: In which each row draws by its place.
        chosen: In that dim, which of the fewer numbers come where; empty where all rows draw alike.
        num_rows: That draw by their places; 0 where all draw alike.
        numbers_per_row: How many a row gets.
    """

    shape: list[int]
    dim: int
    chosen: list[int]
    num_rows: int
    numbers_per_row: int


class _Pattern:
    """Writes numbers that depend on the last dim only, or on a row's place in its slice as well.

    Args:
        sizes: As of :class:`SameDraws`.
        rows: Likewise.
        parts: Likewise.
    """

    def __init__(self, sizes: Sequence[int], rows: Sequence[DrawnRows], parts: int) -> None:
        # By the number of rows alone, whichever run asks: what has as many rows by chance is the same in all runs.
        self._places = {size: list(range(size)) for size in sizes}
        self._places[sum(sizes)] = [place for size in sizes for place in range(size)]
        self._num_places = max(sizes, default=1)
        self._rows = rows
        self._parts = parts
        self._are_alike = not sizes

    def write(self, target: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], Any]) -> torch.Tensor:
        """Writes them into ``target``; one number where it has one dim and rows draw alike."""
        # Seeded from the generator that activation checkpointing puts back, so that recomputing draws the same numbers.
        generator = torch.Generator().manual_seed(int(torch.randint(_SEEDS, ())))
        layout = self.layout_of(target)
        small = torch.empty(layout.shape, dtype=target.dtype)
        fill(small, generator)
        if layout.chosen:
            small = small.index_select(layout.dim, torch.tensor(layout.chosen))
        return target.copy_(small.expand_as(target))

    def layout_of(self, target: torch.Tensor) -> _Layout:
        """How its numbers are made."""
        found, num_rows = self._rows_of(target)
        # Rows are alike in their own dim. A dim of size 1 could tell nothing apart, nor one of steps before the rows
        # unless it is the only one.
        dims = [dim for dim in range(target.ndim) if dim != found.dim and target.shape[dim] > 1]
        shape = [1] * target.ndim
        if dims:
            shape[dims[-1]] = target.shape[dims[-1]]
        alike = math.prod(shape)
        places = self._places.get(num_rows, [])
        if not places:
            return _Layout(shape, found.dim, [], 0, alike)
        shape[found.dim] = self._num_places * found.per_row
        index = self._index_of(found.per_row, places)
        return _Layout(shape, found.dim, index, num_rows, alike * found.per_row)

    def _rows_of(self, target: torch.Tensor) -> tuple[DrawnRows, int]:
        """Where the rows of ``target`` lie, and how many it has."""
        for one in self._rows:
            num_rows = one.num_rows(target.shape)
            if num_rows and (self._are_alike or num_rows in self._places):
                return one, num_rows
        return DrawnRows(tuple(target.shape), 0, 1), target.shape[0] if target.ndim else 0

    def _index_of(self, per_row: int, places: list[int]) -> list[int]:
        """Which number comes where: every row has those of its place, wherever they lie."""
        parts = math.gcd(self._parts, per_row)
        inner = per_row // parts
        index: list[int] = []
        for part in range(parts):
            for place in places:
                first = place * per_row + part * inner
                index += range(first, first + inner)
        return index


def _in_place(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """``x.normal_(mean, std)`` and its kind."""
    options = {key: value for key, value in kwargs.items() if key != "generator"}

    def fill(small: torch.Tensor, generator: torch.Generator) -> None:
        func(small, *args[1:], generator=generator, **options)

    return pattern.write(args[0], fill)


def _keep(pattern: _Pattern, target: torch.Tensor, p: float) -> torch.Tensor:
    """Bernoulli draws; where they would keep nothing of any row, they keep all: zeros are equal, however cut."""
    # Stochastic depth draws one number for a row, and dropout over a few features may well drop all of them.

    def fill(small: torch.Tensor, generator: torch.Generator) -> None:
        small.bernoulli_(p, generator=generator)
        if not bool(small.any()):
            small.fill_(p > 0)

    return pattern.write(target, fill)


def _bernoulli_in_place(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return _keep(pattern, args[0], p)


def _bernoulli(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    # The probabilities may differ from row to row; what is compared with them must not.
    uniform = pattern.write(torch.empty_like(args[0]), _uniform)
    drawn: torch.Tensor = (uniform < args[0]).to(args[0].dtype)
    return drawn


def _bernoulli_of_tensor(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    uniform = pattern.write(torch.empty(args[0].shape, device=args[0].device), _uniform)
    target: torch.Tensor = args[0].copy_(uniform < args[1])
    return target


def _native_dropout(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> Any:
    inputs, p, _ = args
    mask = _keep(pattern, torch.empty_like(inputs), 1 - p)
    # As torch's own kernel has it: with p = 1 all is dropped, and nothing is divided by 0.
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return inputs * mask * scale, mask.bool()


def _uniform(small: torch.Tensor, generator: torch.Generator) -> None:
    small.uniform_(generator=generator)


def _normal(small: torch.Tensor, generator: torch.Generator) -> None:
    small.normal_(generator=generator)


def _made_like(fill: Callable[[torch.Tensor, torch.Generator], Any]) -> Callable[..., torch.Tensor]:
    def draw(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        return pattern.write(torch.empty_like(args[0], **options), fill)

    return draw


def _made(fill: Callable[[torch.Tensor, torch.Generator], Any]) -> Callable[..., torch.Tensor]:
    def draw(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        return pattern.write(torch.empty(args[0], **options), fill)

    return draw


def _normal_of_tensors(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    mean = args[0]
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    like = mean * torch.ones_like(std) if isinstance(std, torch.Tensor) else mean
    noise = pattern.write(torch.empty_like(like), _normal)
    drawn: torch.Tensor = noise * std + mean
    return drawn


def _random_integers(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    *limits, size = args
    options = {"dtype": torch.int64, **{key: value for key, value in kwargs.items() if key != "generator"}}
    low, high = limits if len(limits) == 2 else (0, limits[0])

    def fill(small: torch.Tensor, generator: torch.Generator) -> None:
        small.random_(low, high, generator=generator)

    return pattern.write(torch.empty(size, **options), fill)


def _choices(pattern: _Pattern, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """``torch.multinomial`` by rows: each chooses by its own probabilities, as policies and language models sample."""
    weights: torch.Tensor = args[0].double()
    number = args[1]
    with_replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if number > 1 and not with_replacement:
        # A race in which each is as fast as it is probable: the first ones to arrive.
        times = pattern.write(torch.empty_like(weights), _exponential)
        return (weights / times).topk(number).indices
    sums = weights.cumsum(1)
    shares = pattern.write(weights.new_empty(len(weights), number), _uniform)
    # On the right, as what has no probability is never chosen.
    chosen = torch.searchsorted(sums, shares * sums[:, -1:], right=True)
    return chosen.clamp_(max=weights.shape[1] - 1)


def _exponential(small: torch.Tensor, generator: torch.Generator) -> None:
    small.exponential_(generator=generator)


# By the operator and its overload, as their arguments differ. What is not here, such as
# permutations, mixes rows: it draws as always, and is named.
_DRAWS: dict[str, Callable[..., Any]] = {
    _CHOICES: _choices,
    "bernoulli_.float": _bernoulli_in_place,
    "bernoulli_.Tensor": _bernoulli_of_tensor,
    "bernoulli.default": _bernoulli,
    "native_dropout.default": _native_dropout,
    "rand.default": _made(_uniform),
    "randn.default": _made(_normal),
    "rand_like.default": _made_like(_uniform),
    "randn_like.default": _made_like(_normal),
    "randint.default": _random_integers,
    "randint.low": _random_integers,
    "normal.Tensor_float": _normal_of_tensors,
    "normal.Tensor_Tensor": _normal_of_tensors,
    **dict.fromkeys(
        [
            "normal_.default", "uniform_.default", "exponential_.default", "random_.default", "random_.to",
            "random_.from", "log_normal_.default", "cauchy_.default", "geometric_.default",
        ],
        _in_place,
    ),
}  # fmt: skip
