"""Places in a batch, by path: what is there, and how something else is put there."""

from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from lightning_dpx.replicas import children_of, rebuild

Path = tuple[Any, ...]  # keys, indices and names of attributes
MISSING = object()  # what is at a place that a batch does not have
_SEQUENCES = list | tuple


def value_at(root: Any, path: Path) -> Any:
    """What is at the end of ``path``; :data:`MISSING` where that leads nowhere."""
    for key in path:
        root = child_of(root, key)
    return root


def child_of(node: Any, key: Any) -> Any:
    """The item or attribute of that key, index or name; :data:`MISSING` if there is none."""
    if isinstance(node, MutableMapping):
        return node.get(key, MISSING)
    if isinstance(node, Sequence) and isinstance(key, int):
        if key < len(node):
            return node[key]
        return MISSING
    # An index leads nowhere in what a step has put in the place of a list.
    if not isinstance(key, str):
        return MISSING
    return getattr(node, key, MISSING)


def children_by_key(node: Any) -> list[tuple[Any, Any]] | None:
    """As ``children_of``, with the keys themselves."""
    if isinstance(node, MutableMapping):
        # Keys of a dict need not be texts, and hooks look them up as they are.
        return list(node.items())
    children = children_of(node)
    if children is not None and isinstance(node, Sequence) and not hasattr(node, "_fields"):
        return [(int(name), child) for name, child in children]
    return children


def leaves_by_path(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """All that holds nothing further, with its path, from ``path`` on."""
    if node is MISSING:
        return
    children = None if isinstance(node, torch.Tensor) else children_by_key(node)
    if children is None:
        yield path, node
        return
    for key, child in children:
        yield from leaves_by_path(child, (*path, key))


def put_at(root: Any, path: Path, value: Any) -> None:
    """Puts ``value`` into a batch; :data:`MISSING` takes out what is there."""
    node = value_at(root, path[:-1])
    if not path or (isinstance(node, tuple) and value is not MISSING):
        # A tuple takes no other item, but its tensor can get other memory.
        exchange_memory(value_at(root, path), value)
    elif value is MISSING:
        remove_from(node, path[-1])
    elif isinstance(node, MutableMapping):
        node[path[-1]] = value
    elif isinstance(node, MutableSequence):
        # As a slice, since the step may have appended: there is no such index yet.
        node[path[-1] : path[-1] + 1] = [value]
    else:
        # Frozen dataclasses refuse plain assignment.
        object.__setattr__(node, path[-1], value)


def remove_from(node: Any, key: Any) -> None:
    """Takes an item or attribute out, if it is there."""
    if isinstance(node, MutableMapping):
        node.pop(key, None)
    elif isinstance(node, MutableSequence):
        # The step has shortened the list: everything from there on is gone.
        del node[key:]
    elif not isinstance(node, tuple):
        vars(node).pop(key, None)


@torch.no_grad()
def exchange_memory(tensor: Any, value: Any) -> None:
    """A tensor in a tuple, or that is the batch, gets another one's memory."""
    if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
        # The object stays the one that hooks and loaders hold.
        tensor.data = value.detach()


def is_exchangeable(value: Any) -> bool:
    """Whether a tensor can get another one's memory and be the same tensor still."""
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.requires_grad


def exchangeable(batch: Any) -> Any:
    """Containers anew, and tensors that share memory with those of the loader and can get other memory."""
    if is_exchangeable(batch):
        # Memory is shared, so writes in place reach the loader's tensor as on one device; `.data`
        # of the new object can be set without it. A leaf that requires gradients must stay itself
        # to get them.
        return batch.detach()
    if type(batch) in (list, tuple):
        return type(batch)(map(exchangeable, batch))
    children = None if isinstance(batch, torch.Tensor) else children_by_key(batch)
    if children is None:
        return batch
    return rebuild(batch, [exchangeable(child) for _, child in children])


def kind_of(value: Any) -> type:
    """The kind of container, where one may take the place of another; else a type that tells nothing."""
    for kind in (torch.Tensor, MutableMapping, _SEQUENCES):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            return kind  # type: ignore[return-value]
    # Of anything else, such as a number or a text, hooks may make what they like.
    if children_of(value) is not None:
        return type(value)
    return object


def is_plain_sequence(node: Any) -> bool:
    """Whether a container has items by number only."""
    return isinstance(node, Sequence) and not hasattr(node, "_fields")


def takes_items(shown: Any, made: Any) -> bool:
    """Whether a list or tuple has a place for each item of another one; a list may grow."""
    if type(shown) not in (list, tuple) or type(made) not in (list, tuple):
        return False
    return len(made) == len(shown) or (type(shown) is list and len(made) > len(shown))


def other_kind(shown: Any, made: Any, rows: tuple[int, int], name: str) -> str | None:
    """Where hooks of the transfer made another kind of container than there was, or left out items, in words.

    Args:
        shown: As loaded.
        made: By the hooks, of a slice.
        rows: Of the batch, and of the slice.
        name: Of the place.
    """
    if kind_of(shown) != kind_of(made):
        return f"{name} is a {type(shown).__name__} as loaded, and hooks of its transfer make a {type(made).__name__}."
    if isinstance(shown, torch.Tensor):
        return None
    if kind_of(shown) == _SEQUENCES and (len(shown), len(made)) != rows and not takes_items(shown, made):
        return f"{name} has {len(shown)} items as loaded, and {len(made)} after the hooks of its transfer."
    for key, child in children_by_key(shown) or ():
        other = child_of(made, key)
        if other is not MISSING and (problem := other_kind(child, other, rows, f"{name}.{key}")) is not None:
            return problem
    return None
