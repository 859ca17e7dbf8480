"""Plain attributes of parameters: what the user and libraries have set on them, beside their values and gradients.

A penalty keeps the old value of each weight there, a library of per-sample gradients what its hooks find. Replicas get
what the user's parameters have; what steps set themselves is of one slice, so that a rehearsal asks for it.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.seen_values import content_of, is_content_of

_ATTRIBUTES = operator.attrgetter("__dict__")  # mapped over every parameter of every step, not looped


class ParameterAttributes:
    """Carries what is set on the first replica's parameters to the others.

    Those of subclasses are not touched: a class with attributes of its own copies them itself.

    Args:
        replicas: All of them, the first one first.
        translate: A value of the first replica for another one.
    """

    def __init__(self, replicas: Sequence[Replica], translate: Callable[[Replica, Any], Any]) -> None:
        self._root = replicas[0]
        self._others = list(replicas[1:])
        self._translate = translate
        self._parameters: list[nn.Parameter] = []
        self._seen: dict[int, dict[str, Any]] = {}  # by the place of a parameter; of those that have any

    def follow(self) -> None:
        """Before a step of several replicas: they get what was set, or deleted, since the last one."""
        parameters = self._root.parameters
        # A replica keeps its list as long as the parameters are the same objects.
        if parameters is not self._parameters:
            self._parameters = parameters
            self._seen = {}
        held = list(map(_ATTRIBUTES, parameters))
        if not self._others or not (any(held) or self._seen):
            return
        for index, attributes in enumerate(held):
            seen = self._seen.get(index, {})
            if (attributes or seen) and type(parameters[index]) is nn.Parameter:
                self._send(index, attributes, seen)

    def _send(self, index: int, attributes: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
        changed = {key: value for key, value in attributes.items() if not _is_known(seen, key, value)}
        gone = seen.keys() - attributes.keys()
        self._seen[index] = _contents_of(attributes)
        if not (changed or gone):
            return
        # Replicas of one device may have one parameter between them.
        done = {id(self._parameters[index])}
        for replica in self._others:
            target = replica.parameters[index]
            if id(target) in done:
                continue
            done.add(id(target))
            state = vars(target)
            for key in gone:
                state.pop(key, None)
            for key, value in changed.items():
                state[key] = self._translate(replica, value)


def attributes_of_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, dict[str, Any]]:
    """What is set on parameters now, by their names; for :func:`newly_set`."""
    return {name: _contents_of(vars(parameter)) for name, parameter in named}


def newly_set(named: Iterable[tuple[str, nn.Parameter]], before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of attributes with numbers that any of the parameters has got, or has others of, since ``before``."""
    found: dict[str, None] = {}
    for name, parameter in named:
        seen = before.get(name, {})
        for key, value in vars(parameter).items():
            if _holds_values(value) and not _is_known(seen, key, value):
                found[key] = None
    return list(found)


def _holds_values(value: Any) -> bool:
    """Whether it is what may have been computed from rows; a reference to a module, or a flag, is not."""
    if isinstance(value, Mapping):
        return any(map(_holds_values, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_holds_values, value))
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number or isinstance(value, torch.Tensor | np.ndarray)


def _contents_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content_of(value) for key, value in attributes.items()}


def _is_known(seen: Mapping[str, Any], key: str, value: object) -> bool:
    return key in seen and is_content_of(seen[key], value)
