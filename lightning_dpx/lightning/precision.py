"""The precision plugin that Lightning or the user chose, carried into a step of several replicas."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dpx.arguments import check_choice
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    pl,
)
from lightning_dpx.replicas import children_of, end_failed_step, rebuild
from lightning_dpx.shifting import has_shifts, unshifted

PrecisionName = Literal[
    "32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "transformer-engine",
    "transformer-engine-float16",
]  # fmt: skip
InputDtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


class DPXPrecision(Precision):
    """Carries a precision into every replica: dtypes and autocast, one gradient scaler, one skipped step.

    The strategy puts one round whatever Lightning chose; write it yourself only to give dtypes to inputs:
    ``Trainer(strategy="dpx", plugins=DPXPrecision("bf16-true", input_dtypes={"0": "float32"}))``. The scaler's state is
    stored as Lightning stores it, so a checkpoint file resumes under any other strategy.

    Args:
        wrapped: The plugin that holds the numeric policy (dtype, autocast, gradient scaler), or the name of one.
        input_dtypes: The dtype of an input by its path in the batch (``"0"``, ``"image.mask"``), as MXNet's data
            descriptors had it; given inputs are spared the conversion of the policy.

    Raises:
        ConfigurationError: an argument has a value that is not allowed; at the first batch, a path that is not there.

    Examples:
        >>> precision = dpx.DPXPrecision("bf16-true", input_dtypes={"0": "float32"})
        >>> precision.wrapped.precision
        'bf16-true'
    """

    def __init__(
        self, wrapped: Precision | PrecisionName = "32-true", input_dtypes: dict[str, InputDtype] | None = None
    ) -> None:
        for path, dtype in (input_dtypes or {}).items():
            check_choice(f"input_dtypes[{path!r}]", dtype, get_args(InputDtype))
        self._input_dtypes = {path: getattr(torch, dtype) for path, dtype in (input_dtypes or {}).items()}
        # Set by attach(). Under another strategy there is nothing to call.
        self._after_backward: Callable[[], None] | None = None
        self._shifts = False
        self.wrapped: Precision = make_precision(wrapped)
        vars(self)["precision"] = self.wrapped.precision  # in front of that of Lightning's base class

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the wrapped plugin: code that asks for ``MixedPrecision`` by ``isinstance`` finds it.

        ``isinstance`` with this very class holds as well, by ``type``.
        """
        wrapped = vars(self).get("wrapped")
        # Until the constructor has set it there is only this class to name.
        if wrapped is None:
            return DPXPrecision
        return type(wrapped)

    def __reduce__(self) -> Any:
        """Pickled by its arguments, as it says to be of another class."""
        kept = vars(self)
        dtypes = {path: str(dtype).removeprefix("torch.") for path, dtype in kept["_input_dtypes"].items()}
        return _remake, (kept["wrapped"], dtypes)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped plugin has."""
        # copy and pickle ask for special methods before there is any state. Without this, to look
        # up `wrapped` would lead here again, without end.
        if name == "wrapped" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the wrapped plugin are set there."""
        wrapped = vars(self).get("wrapped")
        # `scaler` is a read-only property of this class, and is replaced on the plugin.
        if wrapped is not None and name not in vars(self) and (name == "scaler" or name in vars(wrapped)):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def attach(self, after_backward: Callable[[], None], *, shifts: bool = False) -> "DPXPrecision":
        """Has ``after_backward`` called between the merged loss's backward and the ``on_after_backward`` hooks.

        Args:
            after_backward: What is called.
            shifts: Whether parts of the module run, or may run, on other devices.
        """
        self._after_backward = after_backward
        self._shifts = shifts
        return self

    def place(self, device: torch.device) -> None:
        """Autocast and scaler of the device that is used: Lightning takes every accelerator but the CPU for CUDA."""
        if not isinstance(self.wrapped, MixedPrecision):
            return
        self.wrapped.device = device.type
        scaler = self.wrapped.scaler
        if scaler is not None and scaler._device != device.type:
            # A scaler cannot be moved to another device; one with the same settings
            # takes its place.
            self.wrapped.scaler = torch.amp.GradScaler(device.type, **_settings(scaler))

    @property
    def scaler(self) -> Any:
        """The gradient scaler of the wrapped plugin, or ``None``."""
        return vars(self.wrapped).get("scaler")

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward of the (scaled) merged loss, then of every replica."""
        try:
            self.wrapped.backward(tensor, model, optimizer, *args, **kwargs)
        except BaseException as error:
            # Autograd may still be running in its own threads; none of them may write a gradient
            # after the step has failed.
            end_failed_step([model], interrupted=isinstance(error, KeyboardInterrupt))
            raise
        # Before post_backward(), in which Lightning calls the on_after_backward hooks: they must
        # find the gradients of the replicas.
        if self._after_backward is not None:
            self._after_backward()

    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Calls the wrapped plugin."""
        return self.wrapped.connect(model, optimizers, lr_schedulers)

    def convert_module(self, module: Module) -> Module:
        """Calls the wrapped plugin."""
        return self.wrapped.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """The batch in the dtypes of the policy, but for the inputs that were given their own.

        Raises:
            ConfigurationError: the batch has no tensor at a given path.
        """
        converted = self.wrapped.convert_input(data)
        if not self._input_dtypes:
            return converted
        # A misspelled path would otherwise do nothing, and say nothing.
        missing = set(self._input_dtypes)
        result = _with_dtypes(data, converted, self._input_dtypes, missing)
        if missing:
            raise ConfigurationError(
                f"input_dtypes names {', '.join(map(repr, sorted(missing)))}, where the batch has no tensor; it has "
                f"{', '.join(map(repr, _paths(data))) or 'none'}."
            )
        return result

    def convert_output(self, data: Any) -> Any:
        """Calls the wrapped plugin."""
        return self.wrapped.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Calls the wrapped plugin."""
        return self.wrapped.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Calls the wrapped plugin."""
        return self.wrapped.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """The wrapped plugin's context; entered once by every replica, in its own thread."""
        return self.wrapped.forward_context()

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.post_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Calls the wrapped plugin, unshifted: a step's shift is not for its optimizer."""
        if not self._shifts and not has_shifts():  # three blocks less, which are 6 us of 400 of an empty step
            return self.wrapped.optimizer_step(optimizer, model, closure, **kwargs)

        # The closure runs the user's step, which is shifted again within the optimizer's step.
        def shifted() -> Any:
            with unshifted(paused=False):
                return closure()

        with unshifted():
            return self.wrapped.optimizer_step(optimizer, model, shifted, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Calls the wrapped plugin, unshifted; see :meth:`optimizer_step`."""
        with unshifted():
            self.wrapped.clip_gradients(optimizer, *args, **kwargs)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.train_step_context()

    def val_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.val_step_context()

    def test_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.test_step_context()

    def predict_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Calls the wrapped plugin."""
        return self.wrapped.predict_step_context()

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Calls the wrapped plugin."""
        self.wrapped.clip_grad_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Calls the wrapped plugin."""
        self.wrapped.clip_grad_by_norm(optimizer, clip_val)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Calls the wrapped plugin."""
        self.wrapped.unscale_gradients(optimizer)

    def main_params(self, optimizer: Any) -> Any:
        """Calls the wrapped plugin."""
        return self.wrapped.main_params(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the wrapped plugin's state where Lightning would without us, so that the file resumes anywhere."""
        # Lightning stores state_dict() of the plugin by itself; that of this class is empty, so
        # nothing is written twice.
        if state := self.wrapped.state_dict():
            # By either key alone, the plain plugin or the subclass would not find its scale again.
            for key in self._keys():
                checkpoint[key] = state
        self.wrapped.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads what :meth:`on_save_checkpoint`, or the plain plugin, stored."""
        if state := next((checkpoint[key] for key in self._keys() if checkpoint.get(key)), None):
            self.wrapped.load_state_dict(state)
        self.wrapped.on_load_checkpoint(checkpoint)

    def _keys(self) -> list[str]:
        """The plugin's own class name first; a subclass's state can also be read by Lightning's own plugin."""
        # Lightning's key is the name of the class, so a subclass's scale would be lost on
        # Lightning's own plugin.
        lightnings = [MixedPrecision.__qualname__] if isinstance(self.wrapped, MixedPrecision) else []
        return list(dict.fromkeys([type(self.wrapped).__qualname__, *lightnings]))

    def teardown(self) -> None:
        """Calls the wrapped plugin."""
        self.wrapped.teardown()


def _remake(wrapped: Precision, input_dtypes: dict[str, InputDtype]) -> DPXPrecision:
    return DPXPrecision(wrapped, input_dtypes)


def make_precision(precision: Precision | str) -> Precision:
    """Lightning's plugin of that name; a plugin is returned as it is.

    Raises:
        ConfigurationError: an unknown name, or a plugin that wraps already.
    """
    if isinstance(precision, DPXPrecision):
        raise ConfigurationError("A DPXPrecision cannot wrap another one; give it Lightning's plugin, or a name.")
    if isinstance(precision, Precision):
        return precision
    check_choice("precision", precision, get_args(PrecisionName))
    match precision:
        case "32-true":
            return Precision()
        case "64-true":
            return DoublePrecision()
        case "16-true" | "bf16-true":
            return HalfPrecision(precision)
        case "16-mixed" | "bf16-mixed":
            scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
            return MixedPrecision(precision, "cpu", scaler)  # the strategy places both on the device of the run
        case _:
            return TransformerEnginePrecision(
                weights_dtype=torch.float16 if precision.endswith("float16") else torch.bfloat16
            )


def _settings(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """What a scaler for another device must be made with; one whose device is missing is disabled, and has none."""
    if not scaler.is_enabled():
        return {}
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


def _with_dtypes(
    given: Any, converted: Any, dtypes: Mapping[str, torch.dtype], missing: set[str], path: str = ""
) -> Any:
    """``converted``, but for the tensors of ``given`` that ``dtypes`` names; takes their paths out of ``missing``."""
    if isinstance(given, Tensor):
        if path not in dtypes:
            return converted
        missing.discard(path)
        # From the tensor as it was given: the policy's conversion may have rounded it.
        return given.to(dtypes[path])
    children = children_of(given)
    if children is None:
        return converted
    pairs = zip(children, children_of(converted) or (), strict=True)
    parts = []
    for (name, child), (_, other) in pairs:
        below = f"{path}.{name}" if path else name
        parts.append(_with_dtypes(child, other, dtypes, missing, below))
    return rebuild(converted, parts)


def _paths(node: Any, path: str = "") -> list[str]:
    if isinstance(node, Tensor):
        return [path]
    found: list[str] = []
    for name, child in children_of(node) or ():
        found += _paths(child, f"{path}.{name}" if path else name)
    return found


def wrap_precision(
    plugin: Precision | None, after_backward: Callable[[], None], *, shifts: bool
) -> DPXPrecision | None:
    """The plugin that Lightning chose, as :meth:`DPXPrecision.attach` makes it; ``None`` for none."""
    if plugin is None:
        return None
    # The user may have given one, with dtypes of inputs; they are not wrapped twice.
    wrapped = plugin if isinstance(plugin, DPXPrecision) else DPXPrecision(plugin)
    wrapped.attach(after_backward, shifts=shifts)
    return wrapped
