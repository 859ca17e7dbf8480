"""``memory_budget``: what it may be, and how many bytes it allows on each device."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.arguments import is_number, is_whole_number
from lightning_dpx.devices import allocated_and_peak, canonical_device, capacity_of, free_bytes, is_host
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.units import format_mib, parse_bytes

Budget = int | float | str  # bytes, a fraction of the device, or "auto" and texts such as "8GiB"
_MARGIN = 0.05  # of what is free, left for what no operator reports: workspaces, fragmentation


def parse_budget(budget: Any, name: str = "memory_budget") -> Any:
    """``None``, ``"auto"``, bytes, or a fraction of the device; or ``{device: one of these}``, but ``None``.

    Raises:
        ConfigurationError: it is none of these.
    """
    # By the name, as the budget of one device cannot be a mapping again.
    if isinstance(budget, Mapping) and name == "memory_budget":
        return _parse_each(budget)
    if budget is None or budget == "auto":
        return budget
    # An int is always bytes: 1 is one byte, and 1.0 all of the device.
    is_fraction = is_number(budget) and not is_whole_number(budget)
    if is_fraction and 0 < budget <= 1:
        return float(budget)
    try:
        return parse_bytes(name, budget)
    except ConfigurationError:
        # Its own words know nothing of fractions. A text with a percent sign is one of what a step
        # would take without a plan wherever else it is allowed, and must not mean another thing here.
        raise ConfigurationError(
            f"{name}={budget!r} is not allowed; give positive bytes, a text such as '8GiB', a fraction of the device "
            "as a number up to 1.0, or 'auto'."
        ) from None


def _parse_each(budgets: Mapping[Any, Any]) -> dict[str, Budget]:
    if not budgets:
        raise ConfigurationError("memory_budget={} is not allowed; give {device: budget}, as in {'cuda:0': '8GiB'}.")
    parsed: dict[str, Budget] = {}
    for device, budget in budgets.items():
        try:
            # Only the name is checked here, as the devices of the run are
            # not known before it begins.
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(
                f"memory_budget names {device!r}, which is no device; give {{device: budget}}, as in "
                "{'cuda:0': '8GiB'}."
            ) from error
        if budget is None:
            raise ConfigurationError(f"memory_budget[{str(device)!r}]=None is not allowed; give 'auto' or bytes.")
        parsed[str(device)] = parse_budget(budget, f"memory_budget[{str(device)!r}]")
    return parsed


class Budgets:
    """How many bytes a step may take on each device, for everything there.

    Args:
        argument: What a user has given, as :func:`parse_budget` has it.
        option: What has led to it, as a user writes it.

    Attributes:
        given: What that means: bytes for texts.
        option: As given.

    Raises:
        ConfigurationError: it is no budget.
    """

    def __init__(self, argument: Any, option: str = "memory_budget") -> None:
        # Errors quote it, so that a user finds it in the script.
        self._argument = argument
        self.option: str = option
        self.given: Any = parse_budget(argument)
        self._each: dict[torch.device, Budget] | None = None

    def place(self, homes: Sequence[torch.device], others: Collection[torch.device]) -> None:
        """Takes the devices of the run: budgets by device must name all of them, and no other.

        Args:
            homes: Of the replicas.
            others: Where parts are, or may be, shifted to.

        Raises:
            ConfigurationError: a device of a replica has no budget, or there is one for another device.
        """
        if not isinstance(self.given, dict):
            return
        named: dict[torch.device, Budget] = {}
        for name, budget in self.given.items():
            # Under one name for each: "cuda" and "cuda:0" may be the same device.
            device = canonical_device(name)
            if device not in homes and device not in others:
                there = ", ".join(map(str, dict.fromkeys((*homes, *others))))
                raise ConfigurationError(f"memory_budget names {name}, but the run is on {there}.")
            if device in named:
                raise ConfigurationError(f"memory_budget names {device} twice; give it one budget.")
            named[device] = budget
        missing = [str(device) for device in dict.fromkeys(homes) if device not in named]
        if missing:
            raise ConfigurationError(
                f"memory_budget={self._argument!r} says nothing of {', '.join(missing)}, where replicas live; give "
                "each device a budget, or 'auto'."
            )
        self._each = named

    def describe(self, device: torch.device) -> str:
        """What was given for ``device``, as a user would write it."""
        # Whoever gave no budget would look for this one in vain.
        if not self.is_users:
            return self.option
        if self._each is None:
            return f"memory_budget={self._argument!r}"
        for name, budget in self._argument.items():
            if canonical_device(name) == device:
                return f"memory_budget[{str(device)!r}]={budget!r}"
        return f"memory_budget[{str(device)!r}]=None"

    @property
    def is_users(self) -> bool:
        """Whether a user has given it, and may give another one."""
        return self.option == "memory_budget"

    def limit(self, device: torch.device, homes: Sequence[torch.device]) -> int:
        """Bytes for all on ``device``. Where parts are shifted to, one budget is the same number, or what there is.

        Args:
            device: Of a replica, or where parts of one are shifted to.
            homes: Of the replicas.

        Raises:
            ConfigurationError: more than the device has, a fraction of one without a limit, or no budget.
        """
        budget = self.given if self._each is None else self._budget_of(self._each, device)
        named = self._each is not None
        target = device not in homes
        # One number is meant for accelerators: where parts are shifted to the
        # host, it may use what is free.
        if isinstance(budget, int | float) and (named or not (target and is_host(device))):
            total = capacity_of(device).total
            if isinstance(budget, float) and not total:
                raise ConfigurationError(
                    f"{self.describe(device)} is a fraction of {device}, which has no limit; give bytes."
                )
            if isinstance(budget, int) and 0 < total < budget:
                # One number for all devices is no claim that a smaller target has as much.
                if target and not named:
                    return total
                raise ConfigurationError(
                    f"{self.describe(device)} is more than {device} has, {format_mib(total)}; give less, or 'auto'."
                )
            if isinstance(budget, float):
                return int(budget * total)
            return budget
        # On the host what is allocated is the resident memory, which is not the tensors' alone.
        present = 0 if is_host(device) else allocated_and_peak(device)[0]
        return present + int(free_bytes(device) * (1 - _MARGIN))

    def room(self, device: torch.device, homes: Sequence[torch.device]) -> int:
        """Bytes that may still be allocated on ``device``: what is free, or what its budget leaves of that.

        Args:
            device: Of a replica, or where parts of one may be shifted to.
            homes: Of the replicas.
        """
        free = free_bytes(device)
        # "auto" allows what is free. A device without a budget is asked about before parts are shifted there.
        if self.given is None or (self._each is not None and device not in self._each):
            return free
        if self.is_measured(device, homes):
            return free
        return max(0, min(free, self.limit(device, homes) - allocated_and_peak(device)[0]))

    def is_measured(self, device: torch.device, homes: Sequence[torch.device]) -> bool:
        """Whether :meth:`limit` is what happens to be free, and so another number in every run."""
        budget = self.given if self._each is None else self._budget_of(self._each, device)
        named = self._each is not None
        target = device not in homes
        return not isinstance(budget, int | float) or (not named and target and is_host(device))

    def _budget_of(self, each: Mapping[torch.device, Budget], device: torch.device) -> Budget:
        if device not in each and not is_host(device):
            raise ConfigurationError(
                f"memory_budget={self._argument!r} says nothing of {device}, where parts of the module are shifted to; "
                "give it a budget, or 'auto'."
            )
        return each.get(device, "auto")
