"""The second meaning of a shift: the computation stays, only what it keeps for backward rests on another device."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_dpx.devices import Resting, canonical_device
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.look_ahead import FetchAhead, Slot
from lightning_dpx.shifting.hooks import copied_part, remove_hooks_of
from lightning_dpx.shifting.shift import choose_modules

_PARKED: "weakref.WeakKeyDictionary[nn.Module, _Parking]" = weakref.WeakKeyDictionary()


def park_activations(
    module: nn.Module, activations: str | Sequence[str], device: torch.device | str = "cpu", look_ahead: int = 2
) -> None:
    """What the chosen submodules keep for backward rests on ``device`` from forward to backward.

    Parameters and buffers stay where they are. A tensor that several operators keep is parked once.

    Args:
        module: The model.
        activations: Submodules, as for :func:`shift_activations`.
        device: Where the tensors rest; the host's memory unless given.
        look_ahead: How many tensors are fetched before backward asks for them, while it computes; they take their place
            on the module's device. With 0 backward waits for each, with 2 for one in eight of a transformer's, with 3
            for the first alone.

    Raises:
        ConfigurationError: a pattern matches nothing, ``look_ahead`` is no number of tensors, or the module is parked
            already.
    """
    if module in _PARKED:
        raise ConfigurationError("The module is parked already; call unpark_activations(module) first.")
    if isinstance(look_ahead, bool) or not isinstance(look_ahead, int) or look_ahead < 0:
        raise ConfigurationError(f"look_ahead={look_ahead!r} is not allowed; give a number of tensors, 0 or more.")
    parking = _Parking(module, canonical_device(device), look_ahead)
    for name in choose_modules(module, [activations] if isinstance(activations, str) else activations):
        child = module.get_submodule(name)
        child.register_forward_pre_hook(parking.enter, prepend=True)
        child.register_forward_hook(parking.leave, always_call=True)
    _PARKED[module] = parking


def unpark_activations(module: nn.Module) -> None:
    """What is kept stays where it was computed again.

    Raises:
        ConfigurationError: the module is not parked.
    """
    parking = _PARKED.pop(module, None)
    if parking is None:
        raise ConfigurationError("The module is not parked.")
    remove_hooks_of(parking, module)


class _Parked(Resting):
    """A tensor that rests, for one or more slots."""

    def __init__(self, tensor: torch.Tensor, place: torch.device) -> None:
        super().__init__(tensor, place)
        self.leave()
        # as long as this is held, no other storage gets the address
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Parking:
    """What a module has parked."""

    def __init__(self, module: nn.Module, place: torch.device, look_ahead: int) -> None:
        self._module, self._place, self._look_ahead = weakref.ref(module), place, look_ahead
        self._entered: dict[int, list[Any]] = {}  # hooks, by thread
        self._lock = threading.Lock()
        self._fetches: FetchAhead[_Parked] = FetchAhead(look_ahead)
        self._parked: weakref.WeakValueDictionary[Any, _Parked] = weakref.WeakValueDictionary()

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        """A chosen submodule begins."""
        root = self._module()
        tensors = (*root.parameters(), *root.buffers()) if root is not None else ()
        stay = {tensor.untyped_storage()._cdata for tensor in tensors if torch._C._has_storage(tensor)}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.device == self._place or not torch._C._has_storage(tensor):
                return tensor
            return tensor if tensor.untyped_storage()._cdata in stay else self._pack(tensor)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        hooks.__enter__()  # type: ignore[no-untyped-call]
        self._entered.setdefault(threading.get_ident(), []).append(hooks)

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        """A chosen submodule ends."""
        hooks = self._entered[threading.get_ident()]
        hooks.pop().__exit__(None, None, None)
        if not hooks:
            del self._entered[threading.get_ident()]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Parking":
        """A copy of the module parks what it keeps by itself."""
        _, module = copied_part(self._module(), memo)
        if module is None:
            return self  # it is copied without any module
        parking = _Parking(module, self._place, self._look_ahead)
        _PARKED[module] = parking
        return parking

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refused.

        Raises:
            UnsupportedError: always; where it would be loaded, the devices may be others.
        """
        raise UnsupportedError(
            f"A module whose activations are parked on {self._place} cannot be pickled: call unpark_activations(module)"
            " first, or save its state_dict(). copy.deepcopy(module) works; the copy is parked, too."
        )

    def _pack(self, tensor: torch.Tensor) -> Slot[_Parked]:
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
        key = tensor.untyped_storage()._cdata, tensor._version, tensor.dtype, geometry
        with self._lock:
            parked = self._parked.get(key)
            if parked is None or parked.storage.expired():  # type: ignore[no-untyped-call]
                parked = self._parked[key] = _Parked(tensor, self._place)
        return self._fetches.slot_for(parked)

    def _unpack(self, saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else self._fetches.take(saved)
