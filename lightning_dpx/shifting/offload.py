"""Offloading, the second kind of shift: only what is kept for backward goes to another device."""

import threading
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lightning_dpx.arguments import check_is_module, is_whole_number
from lightning_dpx.devices import OffloadedTensor, present_devices
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.prefetch import TensorPrefetcher
from lightning_dpx.prefetch_order import PrefetchSlot
from lightning_dpx.shifting.choose import Names, choose_modules
from lightning_dpx.shifting.hooks import copied_part, remove_hooks_of
from lightning_dpx.torch_compat import has_storage, key_of, version_counter

# By identity, as some modules (metrics) have a hash of their own.
_OFFLOADED: "MutableMapping[nn.Module, _Offloading]" = WeakIdKeyDictionary()


def offload_activations(
    module: nn.Module, activations: Names, device: torch.device | str = "cpu", prefetch_depth: int = 2
) -> None:
    """Offloads what the chosen submodules keep for backward: from forward to backward it lies on ``device``.

    Parameters and buffers stay where they are. A tensor that several operators keep is offloaded once.

    Args:
        module: The model.
        activations: Submodules, as for :func:`shift_activations`.
        device: Where the tensors are kept; the host's memory unless given.
        prefetch_depth: How many tensors are fetched before backward asks for them, while it computes; they take their
            place on the module's device. With 0 backward waits for each, with 2 for one in eight of a transformer's,
            with 3 for the first alone.

    Raises:
        ConfigurationError: a pattern matches nothing, the device is not there, ``prefetch_depth`` is no number of
            tensors, or the module is offloaded already.

    Examples:
        >>> dpx.simulate(1)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("sim:0")
        >>> dpx.offload_activations(net, "*", "cpu")
        >>> net(torch.ones(4, 8, device="sim:0")).sum().backward()
    """
    check_is_module(module)
    if module in _OFFLOADED:
        raise ConfigurationError("The module is offloaded already; call unoffload_activations(module) first.")
    if not is_whole_number(prefetch_depth) or prefetch_depth < 0:
        raise ConfigurationError(
            f"prefetch_depth={prefetch_depth!r} is not allowed; give a number of tensors, 0 or more."
        )
    offloading = _Offloading(module, present_devices([device])[0], prefetch_depth)
    for name in choose_modules(module, activations):
        child = module.get_submodule(name)
        # First on the way in, so that what other hooks compute is offloaded as well.
        child.register_forward_pre_hook(offloading.enter, prepend=True)
        child.register_forward_hook(offloading.leave, always_call=True)
    _OFFLOADED[module] = offloading


def unoffload_activations(module: nn.Module) -> None:
    """Takes :func:`offload_activations` back: what is kept for backward stays where it was computed again.

    Args:
        module: The model.

    Raises:
        ConfigurationError: the module is not offloaded.

    Examples:
        >>> dpx.simulate(1)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("sim:0")
        >>> dpx.offload_activations(net, "*", "cpu")
        >>> dpx.unoffload_activations(net)
    """
    check_is_module(module)
    offloading = _OFFLOADED.pop(module, None)
    if offloading is None:
        raise ConfigurationError("The module is not offloaded.")
    remove_hooks_of(offloading, module)


class _Offloaded(OffloadedTensor):
    """An offloaded tensor, for one or more slots."""

    def __init__(self, tensor: torch.Tensor, target: torch.device) -> None:
        super().__init__(tensor, target)
        self.free_original()
        # as long as this is held, no other storage gets the address
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Offloading:
    """What a module has offloaded."""

    def __init__(self, module: nn.Module, target: torch.device, prefetch_depth: int) -> None:
        self._module = weakref.ref(module)
        self._target = target
        self._prefetch_depth = prefetch_depth
        self._entered: dict[int, list[Any]] = {}  # hooks, by thread
        self._lock = threading.Lock()
        self._fetches: TensorPrefetcher[_Offloaded] = TensorPrefetcher(prefetch_depth)
        self._offloaded: weakref.WeakValueDictionary[Any, _Offloaded] = weakref.WeakValueDictionary()

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        """A chosen submodule begins."""
        root = self._module()
        # Looked up in every call: what autograd saves may be a view of a parameter, which takes no
        # memory of its own and may have moved since the last call.
        tensors = (*root.parameters(), *root.buffers()) if root is not None else ()
        stay = {key_of(tensor.untyped_storage()) for tensor in tensors if has_storage(tensor)}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.device == self._target or not has_storage(tensor):
                return tensor
            if key_of(tensor.untyped_storage()) in stay:
                return tensor
            return self._pack(tensor)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        # Torch keeps these hooks for each thread, and two forward hooks stand for the two ends
        # of a `with`.
        hooks.__enter__()  # type: ignore[no-untyped-call]
        self._entered.setdefault(threading.get_ident(), []).append(hooks)

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        """A chosen submodule ends."""
        hooks = self._entered[threading.get_ident()]
        hooks.pop().__exit__(None, None, None)
        if not hooks:
            del self._entered[threading.get_ident()]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Offloading":
        """A copy of the module offloads what it keeps by itself."""
        _, module = copied_part(self._module(), memo)
        if module is None:
            return self  # it is copied without any module
        offloading = _Offloading(module, self._target, self._prefetch_depth)
        _OFFLOADED[module] = offloading
        return offloading

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refused.

        Raises:
            UnsupportedError: always; where it would be loaded, the devices may be others.
        """
        raise UnsupportedError(
            f"A module whose activations are offloaded to {self._target} cannot be pickled: call "
            "unoffload_activations(module) first, or save its state_dict(). copy.deepcopy(module) works; "
            "the copy is offloaded, too."
        )

    def _pack(self, tensor: torch.Tensor) -> PrefetchSlot[_Offloaded]:
        # A conjugate shares memory, version and shape with its original, and has other values.
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
        key = key_of(tensor.untyped_storage()), version_counter(tensor), tensor.dtype, geometry
        with self._lock:
            offloaded = self._offloaded.get(key)
            # Where the storage is gone, its address may have been given to another one.
            if offloaded is None or offloaded.storage.expired():  # type: ignore[no-untyped-call]
                offloaded = self._offloaded[key] = _Offloaded(tensor, self._target)
        return self._fetches.slot_for(offloaded)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return self._fetches.fetch(saved)
