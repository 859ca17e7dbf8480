"""``shifts="auto"``: the last parts of a model that do not fit on its device, by name.

The parts are the submodules in the order of forward. Shifting the last ones cuts the model once on the way in and once
on the way out, and what they keep is freed first in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dpx.activations import Activation
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.units import format_mib

MARGIN = 0.05  # of the free bytes, left for what no trace sees: workspaces, fragmentation


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule with what it holds.

    Attributes:
        name: Its path.
        kept: Bytes that it keeps from forward to backward.
        parameters: Bytes of its parameters.
    """

    name: str
    kept: int
    parameters: int


def scaled(few: Sequence[Activation], more: Sequence[Activation], rows: tuple[int, int], target: int) -> dict[str, int]:
    """Bytes kept by every module for ``target`` rows, extrapolated from traces with ``rows``."""
    bytes_few = _by_module(few)
    bytes_more = _by_module(more)
    predicted = {}
    for name, larger in bytes_more.items():
        smaller = bytes_few.get(name, 0)
        # A part of the bytes does not grow with the rows, so a ratio of the two would be wrong.
        slope = (larger - smaller) / (rows[1] - rows[0])
        predicted[name] = max(0, round(larger + slope * (target - rows[1])))
    return predicted


def parts_of(module: nn.Module, kept: dict[str, int]) -> list[Part]:
    """The parts, in the order of forward; a container that keeps nothing itself is taken apart."""
    units: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        units += _taken_apart(name, child, kept)
    # ``kept`` is in the order of a traced forward; submodules are in the order in which they were assigned.
    order = list(kept)
    positions: dict[str, int] = {}
    following = len(order)
    for name, _ in reversed(units):
        ran = [position for position, other in enumerate(order) if _is_inside(other, name)]
        # One that keeps nothing leaves no trace; it runs before the next that does, as far as anyone can tell.
        following = min(ran, default=following)
        positions[name] = following
    parts = []
    for name, child in sorted(units, key=lambda unit: positions[unit[0]]):
        held = sum(size for other, size in kept.items() if _is_inside(other, name))
        parts.append(Part(name, held, sum(parameter.nbytes for parameter in child.parameters())))
    return parts


def _taken_apart(name: str, child: nn.Module, kept: dict[str, int]) -> list[tuple[str, nn.Module]]:
    """``child``, or its own parts where it only holds them: a step may call those past its ``forward``."""
    children = list(child.named_children())
    # A container that keeps something by itself runs code of its own between its parts.
    if not children or kept.get(name):
        return [(name, child)]
    units: list[tuple[str, nn.Module]] = []
    for key, grandchild in children:
        units += _taken_apart(f"{name}.{key}", grandchild, kept)
    return units


def _is_inside(name: str, container: str) -> bool:
    return name == container or name.startswith(f"{container}.")


def choose_parts(
    parts: Sequence[Part],
    elsewhere: int,
    free: tuple[int, int],
    per_parameter: int = 3,
    *,
    nearest: bool = False,
) -> tuple[list[str], tuple[int, int]]:
    """The fewest last parts to shift so that both devices have room, and the bytes that each will need.

    Args:
        parts: In the order of forward.
        elsewhere: Bytes on the source that no part answers for: kept by functional operators between them, the batch.
        free: Bytes that the source and the target have now, with the parameters on the source.
        per_parameter: Gradients and optimizer state, in parameters' worth of bytes.
        nearest: Whether the cut that lacks least will do where none fits.

    Raises:
        ConfigurationError: no cut fits; with the nearest one and what it lacks.
    """
    room = tuple(int(size * (1 - MARGIN)) for size in free)
    transient = 2 * max((part.kept for part in parts), default=0)
    tried: list[_Cut] = []
    for count in range(len(parts) + 1):
        stay = parts[: len(parts) - count]
        go = parts[len(parts) - count :]
        source = elsewhere + sum(part.kept + per_parameter * part.parameters for part in stay) + transient
        source -= sum(part.parameters for part in go)  # ``free`` was measured with them on the source
        target = sum(part.kept + (1 + per_parameter) * part.parameters for part in go) + (transient if go else 0)
        lacking = max(0, source - room[0]) + max(0, target - room[1])
        if lacking == 0:
            return [part.name for part in go], (source, target)
        tried.append(_Cut(num_shifted=count, source=source, target=target, lacking=lacking))
    best = min(tried, key=lambda cut: cut.lacking)
    if nearest:
        return [part.name for part in parts[len(parts) - best.num_shifted :]], (best.source, best.target)
    raise ConfigurationError(
        f"shifts='auto' found no cut that fits: with the last {best.num_shifted} of {len(parts)} parts shifted the "
        f"devices need {format_mib(best.source, 0)} and {format_mib(best.target, 0)} and have "
        f"{format_mib(room[0], 0)} and {format_mib(room[1], 0)}. Use a smaller batch, or more devices."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Where the parts of a module might be cut, and what both devices would need, in bytes.

    Attributes:
        num_shifted: How many parts would go, counted from the last.
        source: What the device would need that they leave ...
        target: ... and the one that they go to.
        lacking: How much of both is not there.
    """

    num_shifted: int
    source: int
    target: int
    lacking: int


def _by_module(activations: Sequence[Activation]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for activation in activations:
        sizes[activation.module] = sizes.get(activation.module, 0) + activation.num_bytes
    return sizes
