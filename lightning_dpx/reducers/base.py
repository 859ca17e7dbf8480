"""The interface of all reducers: K x N gradients in, N gradients out, each on the device that owns it.

Legend: K replicas, N parameters, D <= K distinct devices. Every mode first sums the replicas of one device
where they are, so that only D lists travel; the modes differ in the way across the devices. Gradients of half precision
are summed in float32. Sparse gradients, and parameters that some replica did not use, take the plain way: to the owner.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from lightning_dpx.devices import canonical_device, distinct_devices, has_nccl, moved
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.reducers.local import add_in_place
from lightning_dpx.registry import Registry
from lightning_dpx.torch_compat import foreach_div, foreach_div_, foreach_mul_

Gradients = list[torch.Tensor | None]
Dense = list[torch.Tensor]
HALVES = frozenset((torch.float16, torch.bfloat16))

# What is compared for every gradient of every step: mapped, not looped over.
_LAYOUT = operator.attrgetter("layout")
_DTYPE = operator.attrgetter("dtype")
_KIND = operator.attrgetter("shape", "dtype", "layout")


class GradientReducer(ABC):
    """Sums the gradients of K replicas.

    Subclass it, write ``sum_between_devices``, which is called where gradients lie on several devices, decorate the
    class with ``@register_reducer("name")``, and ``DPXStrategy(reducer="name")`` uses it.

    Args:
        devices: K devices, one per replica; the first one owns the parameters unless :meth:`owners` says otherwise.
        communication_dtype: Gradients of more bits travel between devices in this dtype; sums stay in their own.

    Raises:
        ConfigurationError: the mode cannot work with these devices, or the dtype is not a floating-point one.

    Examples:
        >>> @dpx.register_reducer("first_only")
        ... class FirstOnly(dpx.GradientReducer):
        ...     '''Adds up on the first device, one gradient after the other.'''
        ...     def sum_between_devices(self, lists, targets):
        ...         totals = []
        ...         for parts, target in zip(zip(*lists), targets):
        ...             total = sum(self.move(part, self.distinct_devices[0]) for part in parts)
        ...             totals.append(self.move(total, self.distinct_devices[target]))
        ...         return totals
        >>> strategy = dpx.DPXStrategy(reducer="first_only")
    """

    def __init__(self, devices: Sequence[torch.device], communication_dtype: torch.dtype | None = None) -> None:
        if communication_dtype is not None and not communication_dtype.is_floating_point:
            raise ConfigurationError(
                f"communication_dtype={communication_dtype} is not allowed; give a floating-point dtype."
            )
        self.devices: tuple[torch.device, ...] = tuple(canonical_device(device) for device in devices)
        self.distinct_devices: tuple[torch.device, ...] = tuple(distinct_devices(self.devices))
        self.communication_dtype = communication_dtype

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """The replica that owns each of N parameters, where its gradient is reduced to and its optimizer state lives.

        Args:
            sizes: Elements of every parameter.
        """
        return [0] * len(sizes)

    @torch.no_grad()
    def reduce(
        self,
        grads: Sequence[Gradients],
        *,
        average: bool = False,
        owners: Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> Gradients:
        """N gradients, each on its owner's device, summed (or averaged) over the replicas.

        Args:
            grads: K x N; K replicas, N parameters in one order. ``None`` means "no gradient" and counts as zero; a
                parameter without a gradient everywhere stays ``None``. The tensors may be reused for the result.
            average: Divide by K.
            owners: A replica per parameter; the reducer's own choice unless given.
            names: Of the parameters, for errors.

        Raises:
            ConfigurationError: not one list per device, lists of different lengths, gradients that do not match, or
                owners that are not one replica per parameter.
        """
        # One device and plain dense gradients: no checks and no lists, only the additions.
        usual = len(self.distinct_devices) == 1 and not average and len(grads) == len(self.devices)
        if usual and _can_be_added_directly(grads):  # one look at each gradient
            first, *others = map(_present, grads)
            add_in_place(first, others)
            return [*first]
        self._check(grads, names)
        if owners is not None:
            self._check_owners(owners, len(grads[0]))
        # The mode's own choice takes the largest gradient of each parameter for its size: some
        # replicas may have none.
        if owners is None:
            owners = self.owners([_num_elements(column) for column in zip(*grads, strict=True)])
        # A parameter that some replica did not use, or that has a sparse gradient there, cannot be in a bucket.
        targets = [self.distinct_devices.index(self.devices[owner]) for owner in owners]
        dense = [index for index, column in enumerate(zip(*grads, strict=True)) if _is_dense(column)]
        total: Gradients = [None] * len(targets)
        divisor = len(grads) if average else 1
        # From here on there are D lists, however many replicas: only these travel.
        lists = self._sum_per_device(grads, dense)
        shrink = self._scale_down(lists)
        # On one device there is nothing to move, so the modes do not differ.
        sums = lists[0] if len(lists) == 1 else self.sum_between_devices(lists, [targets[index] for index in dense])
        # What was divided before it travelled is multiplied back, in its own dtype.
        if shrink != 1 and sums:
            foreach_div_(sums, shrink)
        for index, tensor in zip(dense, _restored(sums, grads[0], dense, divisor), strict=True):
            total[index] = tensor
        for index in set(range(len(targets))).difference(dense):
            total[index] = _add([row[index] for row in grads], self.distinct_devices[targets[index]], divisor)
        return total

    @torch.no_grad()
    def all_reduce(self, grads: Sequence[Gradients], *, average: bool = False) -> list[Gradients]:
        """K x N: every replica gets the sums (or averages) on its own device.

        Args:
            grads: As in :meth:`reduce`.
            average: Divide by K.

        Raises:
            ConfigurationError: as in :meth:`reduce`.
        """
        self._check(grads)
        dense = [index for index, column in enumerate(zip(*grads, strict=True)) if _is_dense(column)]
        lists = self._sum_per_device(grads, dense)
        shrink = self._scale_down(lists)
        # Into the replicas' own gradients: replicas of one device must not share a tensor.
        spread = self.sum_on_every_device(lists) if len(lists) > 1 else lists
        if shrink != 1:
            for sums in spread:
                foreach_div_(sums, shrink)
        divisor = len(grads) if average else 1
        finished = [_restored(sums, grads[0], dense, divisor) for sums in spread]
        totals: list[Gradients] = []
        for device, row in zip(self.devices, grads, strict=True):
            total: Gradients = [None] * len(row)
            sums = finished[self.distinct_devices.index(device)]
            for index, own, tensor in zip(dense, _chosen(row, dense), sums, strict=True):
                total[index] = own if own is tensor else own.copy_(tensor)
            for index in set(range(len(row))).difference(dense):
                total[index] = _add([other[index] for other in grads], device, divisor)
            totals.append(total)
        return totals

    @abstractmethod
    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        """The sums of D > 1 lists of n dense gradients, each on the device that ``targets`` names.

        The tensors of ``lists`` may be overwritten. :meth:`move` brings one to another device.

        Args:
            lists: D x n, the gradients on each of ``self.distinct_devices``; halves come as float32.
            targets: n indices of ``self.distinct_devices``.
        """

    def sum_on_every_device(self, lists: Sequence[Dense]) -> list[Dense]:
        """The sums of D > 1 lists of n dense gradients, on every device."""
        # What every reducer can do: sum on the first device, and send the result to the others.
        sums = self.sum_between_devices(lists, [0] * len(lists[0]))
        spread = []
        for device in self.distinct_devices:
            spread.append([self.move(tensor, device) for tensor in sums])
        return spread

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``tensor`` on ``device``; it travels in the communication dtype."""
        if tensor.device == device:
            return tensor
        # A copy within a device costs no traffic, and integers are counts that no cast may round.
        wire = self.communication_dtype
        if wire is None or not tensor.is_floating_point() or wire.itemsize >= tensor.dtype.itemsize:
            return moved(tensor, device)
        return moved(tensor.to(wire), device).to(tensor.dtype)

    def _scale_down(self, lists: Sequence[Dense]) -> float:
        """A sum of halves overflows where no gradient does: what travels is divided, exactly, by a power of two."""
        if len(lists) == 1 or self.communication_dtype is not torch.float16:
            return 1.0
        # A power of two changes the exponent alone, so no digit of a gradient is lost.
        factor = 0.5 ** (len(self.devices) - 1).bit_length()
        for row in lists:
            if row:
                foreach_mul_(row, factor)
        return factor

    def _sum_per_device(self, grads: Sequence[Gradients], dense: Sequence[int]) -> list[Dense]:
        """D x n: replicas of one device are summed there, in replica order; halves come as float32."""
        lists: dict[torch.device, list[Dense]] = {device: [] for device in self.distinct_devices}
        for device, row in zip(self.devices, grads, strict=True):
            # Only what is of half precision is widened: a copy of all others would double the
            # memory.
            mine = _chosen(row, dense)
            if not HALVES.isdisjoint(map(_DTYPE, mine)):
                mine = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in mine]
            lists[device].append(mine)
        for first, *others in lists.values():
            add_in_place(first, others)
        return [lists[device][0] for device in self.distinct_devices]

    def _check_owners(self, owners: Sequence[int], num_parameters: int) -> None:
        if len(owners) != num_parameters or not all(owner in range(len(self.devices)) for owner in owners):
            raise ConfigurationError(
                f"owners={list(owners)} is not allowed; give one of the replicas 0 to {len(self.devices) - 1} for each "
                f"of {num_parameters} parameters."
            )

    def _check(self, grads: Sequence[Gradients], names: Sequence[str] = ()) -> None:
        if len(grads) != len(self.devices) or len({len(row) for row in grads}) != 1:
            raise ConfigurationError(
                f"A sum needs {len(self.devices)} lists of equal length (one per replica), got lengths "
                f"{[len(row) for row in grads]}."
            )
        if _are_alike(grads):
            return
        for index, column in enumerate(zip(*grads, strict=True)):
            # The slow way, to name the parameter, after the fast one has found a difference or a
            # gap.
            kinds = {(tuple(g.shape), g.dtype, g.layout) for g in column if g is not None}
            if len(kinds) > 1:
                described = " and ".join(sorted(f"{list(shape)} {dtype} {layout}" for shape, dtype, layout in kinds))
                name = names[index] if index < len(names) else index
                raise ConfigurationError(
                    f"The gradients of parameter {name} differ between the replicas: {described}; all must agree."
                )


def _num_elements(column: Iterable[torch.Tensor | None]) -> int:
    return max((gradient.numel() for gradient in column if gradient is not None), default=0)


def _is_dense(column: Iterable[torch.Tensor | None]) -> bool:
    return all(gradient is not None and gradient.layout == torch.strided for gradient in column)


def _can_be_added_directly(grads: Sequence[Gradients]) -> bool:
    """Whether every list has the same dense gradients, of a dtype that is summed as it is."""
    first = grads[0]
    if any(len(row) != len(first) or type(None) in set(map(type, row)) for row in grads):
        return False
    # Of the first alone, as the others are then compared with it.
    if not set(map(_LAYOUT, first)) <= {torch.strided} or not HALVES.isdisjoint(map(_DTYPE, first)):
        return False
    return all(_has_kinds_of(first, row) for row in grads[1:])


def _are_alike(grads: Sequence[Gradients]) -> bool:
    """Whether all gradients are there, and agree between the replicas."""
    if any(type(None) in set(map(type, row)) for row in grads):
        return False
    return all(_has_kinds_of(grads[0], row) for row in grads[1:])


def _has_kinds_of(first: Gradients, row: Gradients) -> bool:
    # Compared one by one, without lists of the shapes: thousands of new tuples would start the garbage collector.
    return all(map(operator.eq, map(_KIND, first), map(_KIND, row)))


def _chosen(row: Gradients, indices: Sequence[int]) -> Dense:
    return _present([row[index] for index in indices])


def _present(row: Gradients) -> Dense:
    return [gradient for gradient in row if gradient is not None]


def _restored(sums: Dense, row: Gradients, indices: Sequence[int], divisor: int) -> Dense:
    """Sums, divided, in the dtype that their gradients came in."""
    # Before the cast, or an average of halves would overflow where only the sum does.
    divided = list(foreach_div(sums, divisor)) if divisor > 1 and sums else sums
    return [total.to(own.dtype) for total, own in zip(divided, _chosen(row, indices), strict=True)]


def _add(column: Sequence[torch.Tensor | None], owner: torch.device, divisor: int) -> torch.Tensor | None:
    """The plain way, for gradients that are sparse or missing on some replicas."""
    present = _present([*column])
    if not present:
        return None
    first, *others = present
    dtype = first.dtype
    # A sum in half precision may overflow where its terms do not.
    wide = torch.float32 if dtype in HALVES else dtype
    total = first.to(owner).to(wide)
    for gradient in others:
        # Not in place: of two sparse gradients the sum has other indices than either.
        total = total + gradient.to(owner).to(wide)
    if divisor > 1:
        total = total / divisor
    return total.to(dtype)


REDUCERS: Registry[GradientReducer] = Registry("reducer", GradientReducer, reserved=("auto",))
# Written out, as type checkers outside of the package do not look into REDUCERS.
register_reducer: Callable[[str], Callable[[type[GradientReducer]], type[GradientReducer]]] = REDUCERS.register


def make_reducer(
    reducer: str | GradientReducer,
    devices: Sequence[torch.device],
    communication_dtype: torch.dtype | None = None,
) -> GradientReducer:
    """The reducer that ``reducer`` names.

    ``"auto"`` sums directly where all replicas share one device, uses NCCL between CUDA devices that have it, and
    otherwise lets every device sum its share.

    Raises:
        ConfigurationError: the name is unknown, or the mode cannot work with these devices.
    """
    if isinstance(reducer, GradientReducer):
        return reducer
    if reducer == "auto":
        reducer = choose_reducer(devices)
    return REDUCERS[reducer](devices, communication_dtype)


def choose_reducer(devices: Sequence[torch.device]) -> str:
    """What ``"auto"`` stands for on these devices."""
    distinct = distinct_devices(devices)
    if len(distinct) == 1:
        return "naive"
    # NCCL takes one tensor of each device, so replicas must not share any.
    if len(distinct) == len(devices) and has_nccl(distinct):
        return "nccl"
    return "collective"
