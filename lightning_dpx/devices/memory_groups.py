"""The memory that a container or a job scheduler leaves a process of its host: control groups of Linux.

A process beyond it is killed without an error, however much the machine has. Groups are nested, with or without limits.

    version 2    /sys/fs/cgroup/GROUP/memory.max                         "max" without a limit
    version 1    /sys/fs/cgroup/memory/GROUP/memory.limit_in_bytes       a number larger than any memory without one
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes


class GroupMemory(NamedTuple):
    """What is left to a group.

    Attributes:
        limit: Bytes.
        free: Those that it does not use, or that the system takes back when they are needed.
    """

    limit: int
    free: int


class _Files(NamedTuple):
    """Where a group says what it may use, and what it uses."""

    limit: Path
    used: Path
    details: Path
    reclaimable: tuple[str, ...]


def group_memory(own: Path = _OWN, root: Path = _ROOT) -> GroupMemory | None:
    """Of the groups that this process is in, the one with the least left; ``None`` without a limit.

    Args:
        own: Tells the groups of the process.
        root: Where groups are folders.
    """
    least: GroupMemory | None = None
    for files in _limited(own, root):
        try:
            limit = _number(files.limit)
            # Pages of files count as used, and go as soon as something else needs the room.
            free = max(0, limit - _number(files.used)) + _reclaimable(files)
        except (OSError, ValueError):  # the group has gone, or its limit
            continue
        found = GroupMemory(limit, min(free, limit))
        if least is None or found.free < least.free:
            least = found
    return least


@cache
def _limited(own: Path, root: Path) -> tuple[_Files, ...]:
    """The groups with a limit, looked for once: a process hardly ever changes its own."""
    found = []
    for files in _groups(own, root):
        try:
            if _number(files.limit) < _NO_LIMIT:
                found.append(files)
        except (OSError, ValueError):  # no such group in here, or "max"
            continue
    return tuple(found)


def _groups(own: Path, root: Path) -> list[_Files]:
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _with_parents(root, group):
                used = folder / "memory.current"
                found.append(
                    _Files(folder / "memory.max", used, folder / "memory.stat", ("inactive_file", "active_file"))
                )
        elif "memory" in controllers.split(","):
            for folder in _with_parents(root / "memory", group):
                used = folder / "memory.usage_in_bytes"
                details = folder / "memory.stat"
                reclaimable = ("total_inactive_file", "total_active_file")
                found.append(_Files(folder / "memory.limit_in_bytes", used, details, reclaimable))
    return found


def _with_parents(root: Path, group: str) -> list[Path]:
    """The folders of a group and of those round it; in a container its own is the root of what it sees."""
    folder = root / group.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


def _reclaimable(files: _Files) -> int:
    found = 0
    for line in files.details.read_text(encoding="ascii").splitlines():
        name, _, number = line.partition(" ")
        # Also those that were read more than once, as a data set is.
        if name in files.reclaimable:
            found += int(number)
    return found
