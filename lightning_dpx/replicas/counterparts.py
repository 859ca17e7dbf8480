"""What a value of the first replica is on another one, and the other way round.

Submodules, parameters, buffers and mirrored containers have a counterpart on every replica; tensors are copied to its
device; anything else that neither is nor holds one of these is the same object for all.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import device_beside
from lightning_dpx.python_objects.object_graph import ATOMS
from lightning_dpx.replicas.array_slices import copied_to
from lightning_dpx.replicas.copying.copy_memo import prepare_memo
from lightning_dpx.replicas.copying.own_parameters import like_parameter
from lightning_dpx.replicas.copying.shared_objects import is_shared
from lightning_dpx.replicas.mirrors import Mirrors
from lightning_dpx.replicas.remote_tensor import RemoteTensor, source_of
from lightning_dpx.replicas.replica import Replica

_FEW = 2**16  # elements of a tensor that is copied to other replicas whether they use it or not


class Counterparts:
    """Translates values between the first replica and the others.

    Args:
        root: The first replica.
        mirrors: Containers that have a counterpart of their own on every replica.
        kept: Objects that are shared whatever they hold.

    Attributes:
        mirrors: As given.
    """

    def __init__(self, root: Replica, mirrors: Mirrors, kept: Sequence[object]) -> None:
        self._root = root
        self.mirrors: Mirrors = mirrors
        self._kept = {id(one): one for one in kept}
        self._memos: dict[int, dict[int, Any]] = {}

    def forget(self, replica: int | None = None) -> None:
        """Ids are another one's by now, or there are more counterparts: of one replica, or of all."""
        # Both directions of all replicas: a container that is paired anew is another object on each of them.
        if replica is None:
            self._memos = {}
        else:
            self._memos.pop(replica, None)

    def is_boundary(self, value: Any) -> bool:
        """Whether ``value`` is shared whatever it holds, and is not looked into."""
        return is_shared(value, self._kept)

    def there(self, replica: Replica, value: Any, *, lazily: bool) -> Any:
        """``value`` of the root for ``replica``."""
        if type(value) in ATOMS:
            return value
        memo = self._memo(replica)
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            device = device_beside(value, self._root.device, replica.device)
            # A step of the first replica may write it in place before another one looks at it.
            lazily = lazily and value.numel() > _FEW and _is_plain(value)
            if lazily:
                return RemoteTensor(value.detach(), device)
            return copied_to(value, device)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            device = device_beside(tensor, self._root.device, replica.device)
            if not isinstance(tensor, nn.Parameter):
                if _is_plain(tensor):
                    return RemoteTensor(tensor.detach(), device)
                return copied_to(tensor, device)
            # Hooks average such parameters in place: each replica needs a copy to write to, and
            # its hidden tensors follow the first one's before every step.
            copied = like_parameter(tensor, tensor.detach().to(device, copy=True))
            replica.hidden.add([(tensor, copied)])
            return copied

        def place_buffer(tensor: torch.Tensor) -> torch.Tensor:
            # Now, and not when it is first used: by then the first replica's forward may have written it.
            copied = copied_to(tensor, device_beside(tensor, self._root.device, replica.device))
            replica.hidden.add([(tensor, copied)])
            return copied

        return self._copied(value, memo, place, place_buffer)

    def back(self, replica: Replica, value: Any) -> Any:
        """``value`` of ``replica`` for the root."""
        if type(value) in ATOMS:
            return value

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, RemoteTensor):
                return source_of(tensor)
            return tensor.to(device_beside(tensor, replica.device, self._root.device))

        return self._copied(value, self._memo(replica, back=True), place)

    def _copied(self, value: Any, known: dict[int, Any], place: Any, place_buffer: Any = None) -> Any:
        memo = dict(known)
        try:
            prepare_memo(memo, [value], [], place=place, is_boundary=self.is_boundary, place_buffer=place_buffer)
            return copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001  iterators, files, C handles: there is one of it, for all
            return value

    def _memo(self, replica: Replica, *, back: bool = False) -> dict[int, Any]:
        """The counterparts of submodules, parameters, buffers and mirrored containers, by id."""
        # Replica 0 has no counterparts of its own, so the sign tells the directions apart.
        place = -replica.index if back else replica.index
        # Made when it is first asked for: most steps translate nothing.
        if place not in self._memos:
            memo: dict[int, Any] = {}
            pairs = [
                *zip(self._root.modules, replica.modules, strict=True),
                *zip(self._root.parameters, replica.parameters, strict=True),
                # Not strict: between two turns only one of both may have registered a new buffer.
                *zip(self._root.buffers, replica.buffers, strict=False),
            ]
            pairs += self.mirrors.pairs(replica.index)
            for mine, theirs in pairs:
                if back:
                    memo[id(theirs)] = mine
                else:
                    memo[id(mine)] = theirs
            self._memos[place] = memo
        return self._memos[place]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has no methods and attributes of its own, which what stands for it would have to have as well."""
    return type(tensor) in (torch.Tensor, RemoteTensor) and (type(tensor) is RemoteTensor or not vars(tensor))
