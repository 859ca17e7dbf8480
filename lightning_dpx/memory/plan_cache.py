"""Profiles and plans of earlier runs, found again by what they were made from.

    key of a step     its module, batch and surroundings; see python_objects/digest.py     -> its profiles
    key of plans      the profiles, budgets, planner                                       -> the plans

A plan is a function of what its key is made of. A profile depends on more than a key can hold (numbers in tensors, the
machine's mood), so a plan that was made from one that was found must be watched in its first steps, as one from a file
is. Entries are JSON, one file each, written whole; the ones that were not used for longest go when there are too many.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.devices import is_host, modelled_rates
from lightning_dpx.errors import ConfigurationError, PlanError
from lightning_dpx.memory.execute.recipes import OWN_RECIPES
from lightning_dpx.memory.plan.make_plan import plan_candidates
from lightning_dpx.memory.plan.plan import MemoryPlan, from_mapping, to_mapping
from lightning_dpx.memory.plan.plan_file import MOST_BYTES, write_whole
from lightning_dpx.memory.plan.problem import Planner
from lightning_dpx.memory.profile import data as profiles_module
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.python_objects.digest import Digest
from lightning_dpx.python_objects.process_settings import float32_precision
from lightning_dpx.units import MIB

_FORMAT = 4
_MOST_ENTRIES = 256
_MOST_TOTAL = 512 * MIB  # files, and bytes of all of them
_SUFFIX = ".json"
Say = Callable[[str], None]


def default_folder() -> Path:
    """Where entries are kept unless told otherwise: in the user's folder for caches."""
    # By the rules of each system for caches; those of XDG have relative paths ignored.
    given = os.environ.get("XDG_CACHE_HOME")
    if given and Path(given).is_absolute():
        base = Path(given)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "lightning_dpx" / "plans"


class PlanCache:
    """Entries in a folder, or none at all.

    Args:
        where: The folder; ``True`` for the user's own, ``False`` for none.
        say: Told, in a sentence, what cannot be read or written; users of the cache tell it what was found.

    Attributes:
        say: As given.

    Raises:
        ConfigurationError: ``where`` is none of these.
    """

    def __init__(self, where: bool | str | os.PathLike[str] = True, say: Say = lambda _: None) -> None:
        if not isinstance(where, bool | str | os.PathLike) or where == "":  # "" is the current folder
            raise ConfigurationError(
                f"plan_cache={where!r} is not allowed; give True, False, or the path of a folder for plans."
            )
        self._where = where
        self.say = say
        self._is_broken = False
        self._own = set[str]()  # keys of plans that were made with this cache, and are no news when they are found

    @property
    def is_on(self) -> bool:
        """Whether anything is looked for and kept."""
        return self._where is not False

    @property
    def folder(self) -> Path:
        """The folder of the entries."""
        if isinstance(self._where, bool):
            return default_folder()
        return Path(self._where).expanduser()

    def path_of(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / f"{key}{_SUFFIX}"

    def load(self, key: str) -> Any:
        """What was kept under ``key``; ``None`` where nothing was, or nothing that can be read."""
        if not self.is_on or not key:
            return None
        path = self.path_of(key)
        try:
            # No entry of ours is so long, and to read it would take memory before anything can be
            # checked.
            if path.stat().st_size > MOST_BYTES:
                return None
            head, _, text = path.read_text(encoding="utf-8").partition("\n")
            # A disk that was full, or an edit: numbers that are no longer what was written would
            # be believed.
            if head != _checksum(text):
                self.say(f"dpx: {path} is not whole, and is made anew.")
                return None
            os.utime(path)  # it is in use, and among the last to go
            return json.loads(text)
        except (FileNotFoundError, NotADirectoryError):
            return None  # what cannot be written either is told then
        except (OSError, ValueError, RecursionError) as error:
            self.say(f"dpx: {path} cannot be read ({error}), and is made anew.")
            return None

    def save(self, key: str, content: Any) -> None:
        """Keeps ``content``, of lists, texts, numbers and ``None``; says so, once, where that cannot be done."""
        if not self.is_on or not key or self._is_broken:
            return
        text = json.dumps(content, separators=(",", ":"), default=_plain)
        if len(text) > MOST_BYTES - 128:  # load() refuses it, with the line of the checksum
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.path_of(key), f"{_checksum(text)}\n{text}")
            self._remove_oldest()
        except OSError as error:
            # Other entries would fail alike, and one line about it is enough.
            self._is_broken = True
            self.say(f"dpx: memory plans cannot be kept in {self.folder} ({error}): the next run plans again.")

    def forget(self, *keys: str) -> None:
        """Removes entries that were wrong."""
        for key in filter(None, keys):
            try:
                self.path_of(key).unlink(missing_ok=True)
            except OSError as error:
                self.say(f"dpx: {self.path_of(key)} does not fit its step and cannot be removed ({error}).")

    def _remove_oldest(self) -> None:
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            # Also what a process left that was killed while it wrote; see write_whole.
            if path.suffix == _SUFFIX or path.suffix == ".new":
                try:
                    state = path.stat()
                except FileNotFoundError:  # another process has removed it
                    continue
                entries.append((state.st_mtime, state.st_size, path))
        total = 0
        # The ones that were used last are kept, as long as they are within both limits.
        for position, (_, size, path) in enumerate(sorted(entries, key=lambda entry: -entry[0])):
            total += size
            if position >= _MOST_ENTRIES or total > _MOST_TOTAL:
                path.unlink(missing_ok=True)

    # ---- profiles ----

    def profiles(self, key: str) -> list[Profile] | None:
        """The profiles of a step; ``None`` where none can be read."""
        content = self.load(key)
        if content is None:
            return None
        try:
            found = [_decoded(each) for each in content["profiles"]]
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # whole, and no profile: of another version, or edited
        if not found or not all(isinstance(each, Profile) for each in found):
            return None
        return found

    def keep_profiles(self, key: str, profiles: Sequence[Profile]) -> None:
        """Keeps the profiles of a step for the next run."""
        if self.is_on and key:
            self.save(key, {"profiles": [_encoded(profile) for profile in profiles]})

    def profile(
        self, key: str, make: Callable[[], Profile], *, is_poor: Callable[[Profile], bool] = lambda _: False
    ) -> Profile:
        """The profile of a step, or what ``make`` gives, which is kept.

        Args:
            key: Of the step.
            make: Profiles it.
            is_poor: Whether a better profile than the one that was kept can be made now.
        """
        found = self.profiles(key)
        if found is not None and len(found) == 1 and not is_poor(found[0]):
            return found[0]
        made = make()
        self.keep_profiles(key, [made])
        return made

    # ---- plans ----

    def has_made(self, key: str) -> bool:
        """Whether the plans under ``key`` are those of this run, such as one for another device of the same kind."""
        return key in self._own

    def plans(self, key: str, module: nn.Module) -> tuple[list[MemoryPlan], list[int]] | None:
        """The plans of a module, and numbers kept with them; ``None`` if not for ``module``."""
        content = self.load(key)
        if content is None:
            return None
        try:
            plans = [from_mapping(each, str(self.path_of(key))) for each in content["plans"]]
            for plan in plans:  # the key is made of profiles, which another module may have as well
                plan.check(module)
            return plans, [int(number) for number in content["numbers"]]
        except (KeyError, TypeError, ValueError, PlanError) as error:
            self.say(f"dpx: the plan in {self.path_of(key)} is not for this module ({error}): it is planned anew.")
            return None

    def keep_plans(self, key: str, plans: Sequence[MemoryPlan], numbers: Sequence[int] = ()) -> None:
        """Keeps plans for the next run."""
        if self.is_on and key:
            self._own.add(key)
            self.save(key, {"plans": [to_mapping(plan) for plan in plans], "numbers": list(numbers)})


def found_or_planned(
    cache: PlanCache,
    module: nn.Module,
    profile: Profile,
    budget: int | None,
    planner: str | Planner,
    *,
    choose: Callable[[Sequence[MemoryPlan]], MemoryPlan] = itemgetter(0),
) -> tuple[MemoryPlan, str]:
    """The plan for ``module``, whose step is ``profile``, and the key that it was found by; empty where it is new.

    Args:
        cache: Where it may be.
        module: What is planned for.
        profile: Of its step.
        budget: Bytes; ``None`` for as few as possible.
        planner: Who decides.
        choose: Chooses among the plans that may be fastest, the first of which is said to be.

    Raises:
        BudgetError: the budget cannot be met.
    """
    key = key_of_plans([profile], planner, budget) if cache.is_on else ""
    found = cache.plans(key, module)
    if found is not None and len(found[0]) == 1:
        if cache.has_made(key):
            return found[0][0], ""
        return found[0][0], key
    plan = choose(plan_candidates(module, profile, budget, planner))
    cache.keep_plans(key, [plan])
    return plan, ""


def key_of_step(module: nn.Module, batch: Any, device: torch.device, *others: Any) -> str:
    """The key of a step's profiles; empty where it cannot be told what the step depends on.

    Args:
        module: What runs.
        batch: On which data; their shapes count, and not their numbers.
        device: Whose memory is looked at.
        others: What else the step depends on.
    """
    digest = Digest()
    # All that an equal module and batch could be profiled otherwise by.
    digest.add(_FORMAT, *_versions(), *_surroundings(device))
    try:
        # A profile has compared what these recipes give: with others its plans might give other numbers.
        for name in sorted(OWN_RECIPES):
            digest.add(name, OWN_RECIPES[name])
        digest.add(module)
        digest.add_batch(batch)
        digest.add(*others)
    except Exception:  # noqa: BLE001  a look at an object of the user's may run its code, and that may fail
        return ""
    # What could not be looked at may be another the next time, so there is no key.
    if digest.is_whole:
        return digest.text()
    return ""


def key_of_plans(profiles: Iterable[Profile], planner: str | Planner, *others: Any) -> str:
    """The key of the plans that are made from these profiles.

    Args:
        profiles: Of all steps.
        planner: Who decides.
        others: What else the plans depend on, such as budgets.
    """
    digest = Digest()
    digest.add(_FORMAT, *_versions(), planner if isinstance(planner, str) else _of_planner(planner), *others)
    for profile in profiles:
        digest.add(hashlib.sha256(json.dumps(_encoded(profile), default=_plain).encode()).hexdigest())
    if digest.is_whole:
        return digest.text()
    return ""


def _of_planner(planner: Planner) -> tuple[Any, ...]:
    return type(planner).__qualname__, dict(vars(planner)), type(planner).choose


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """The versions of all that makes profiles and plans, and this package's files as they are."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    described = []
    for path in files:
        state = path.stat()
        described.append(f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}")
    try:
        solver = version("highspy")
    except PackageNotFoundError:
        solver = ""
    here = hashlib.sha256("\n".join(described).encode()).hexdigest()
    return torch.__version__, np.__version__, sys.version, solver, here


def _surroundings(device: torch.device) -> tuple[Any, ...]:
    """What operators on ``device`` depend on beside their arguments."""
    backends: Any = torch.backends
    # Which kernel attention takes decides what it saves.
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    sdp = [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in kernels]
    cudnn = backends.cudnn
    flags = (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), *float32_precision(),
        backends.mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *sdp,
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
    )  # fmt: skip
    return (*flags, torch.get_num_threads(), _kind_of(device))


def _kind_of(device: torch.device) -> tuple[object, ...]:
    """The model of a device, or of the processor."""
    if is_host(device) or device.type == "meta":
        # A folder of caches may be shared by machines whose processors have other kernels.
        return device.type, platform.machine(), str(torch.backends.cpu.get_cpu_capability())
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    # A simulated device has the rates that it was given.
    return device.type, "" if named is None else str(named(device)), *(modelled_rates(device) or ())


_CLASSES: dict[str, Any] = {name: kind for name, kind in vars(profiles_module).items() if is_dataclass(kind)}


def _plain(number: np.generic) -> Any:
    """A number of NumPy's as one that JSON knows."""
    return number.item()


def _encoded(value: Any) -> Any:
    """``value`` as JSON: a dataclass of a profile is a list that begins with its name."""
    if isinstance(value, tuple):
        if value and is_dataclass(value[0]):
            # A profile has tuples of thousands of values: their class is written once for all.
            kind = type(value[0]).__name__
            return ["each", kind, [_fields_of(item) for item in value]]
        # JSON would give lists back for tuples, so they are marked. Most hold numbers only, and
        # need no look at each.
        items = [_encoded(item) for item in value] if _holds_tuples(value) else list(value)
        return ["tuple", items]
    if is_dataclass(value):
        return ["one", type(value).__name__, _fields_of(value)]
    return value


def _holds_tuples(value: tuple[Any, ...]) -> bool:
    return any(isinstance(item, tuple) for item in value)


def _fields_of(value: Any) -> list[Any]:
    return [_encoded(getattr(value, name)) for name in _names_of(type(value))]  # type: ignore[arg-type]


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if value[0] == "tuple":
        return tuple(map(_decoded, value[1]))
    # Only classes of profiles: a file from a folder of others can make nothing else.
    kind = _CLASSES[value[1]]
    if value[0] == "one":
        return kind(**_named(kind, value[2]))
    return tuple(kind(**_named(kind, item)) for item in value[2])


def _named(kind: type, values: list[Any]) -> dict[str, Any]:
    return dict(zip(_names_of(kind), map(_decoded, values), strict=True))
