"""Forward hooks that belong to one object. A deepcopy of their module has the hooks, and no handles of its own."""

from typing import Any

from torch import nn

from lightning_dpx.torch_compat import (
    forward_hooks_always_called,
    forward_hooks_of,
    forward_hooks_with_kwargs,
    forward_pre_hooks_of,
    forward_pre_hooks_with_kwargs,
)


def copied_part(root: nn.Module | None, memo: dict[int, Any]) -> tuple[str, nn.Module | None]:
    """In a deepcopy that goes on: the outermost part of ``root`` that is being copied, by name, and its copy."""
    # A module is in the memo before what it holds is copied, and parents are named
    # before their parts.
    parts = root.named_modules() if root is not None else ()
    return next(((name, memo[id(part)]) for name, part in parts if id(part) in memo), ("", None))


def remove_hooks_of(owner: object, module: nn.Module) -> None:
    """Takes the forward hooks that are methods of ``owner`` off ``module`` and its parts."""
    for child in module.modules():
        notes: tuple[dict[int, Any], ...] = (
            forward_pre_hooks_with_kwargs(child),
            forward_hooks_with_kwargs(child),
            forward_hooks_always_called(child),
        )
        for hooks in (forward_pre_hooks_of(child), forward_hooks_of(child)):
            # By the object that the hook is a method of, as a deepcopy has no handle to
            # remove it by.
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner]:
                del hooks[key]
                for noted in notes:
                    noted.pop(key, None)
