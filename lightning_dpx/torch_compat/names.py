"""Classes, functions and attributes of torch without public counterparts, under public names."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import _appdirs, overrides
from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrame
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import graph as _graph
from torch.nn.modules import module as _nn_module
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

# ---- classes and functions, under public names ----

# Bound once, here: other files import what they use under names without an underscore.
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten

# One kernel for a list of tensors, where a loop launches one for each.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_

# What stands between a call and its operator: switched off around our own work, which is no step of the user's.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchDispatch = torch._C._DisableTorchDispatch
DisableFuncTorch = torch._C._DisableFuncTorch
DisableAutocast = torch._C._DisableAutocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled
len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
len_torch_function_stack = torch._C._len_torch_function_stack
function_modes: Callable[[], list[overrides.TorchFunctionMode]] = overrides._get_current_function_mode_stack
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Asked before a storage is, as some tensors have none and raise.
has_storage = torch._C._has_storage
privateuse1_backend_name = torch._C._get_privateuse1_backend_name
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack

# The public context manager can neither be entered for a part of a forward nor tell which hooks are on.
top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks
saved_tensors_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

# Namespaces of operators in which processes meet: to repeat one alone would wait for the others for ever.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})

# What turns a function into compiled code: the settings of torch.compile, and what it calls for a frame.
COMPILER_TYPES: tuple[type, ...] = (_TorchDynamoContext, CatchErrorsWrapper, ConvertFrame)

# The public profiler takes these as they are, and has no names for them.
ProfilerConfig = torch._C._profiler._ExperimentalConfig
ProfilerEventType = torch._C._profiler._EventType
execution_engine: Any = torch.autograd.Variable._execution_engine
# Compared with the code of frames, which is the same object in every call.
engine_code = _graph._engine_run_backward.__code__
has_any_global_hook: Callable[[], bool] = _nn_module._has_any_global_hook
# One dict each for as long as the process lives.
global_module_hooks: tuple[dict[int, Any], ...] = (
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_forward_hooks,
    _nn_module._global_backward_pre_hooks,
    _nn_module._global_backward_hooks,
)
free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
register_device_module: Callable[[str, object], None] = torch._register_device_module
pynvml_handler: Any = getattr(torch.cuda, "_get_pynvml_handler", None)
preserve_version_counter: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
user_cache_dir: Callable[..., str] = _appdirs.user_cache_dir

# ---- attributes, as functions without Python frames: thousands of tensors are asked in every step ----

key_of: Callable[[Any], int] = attrgetter("_cdata")
version_counter: Callable[[torch.Tensor], int] = attrgetter("_version")
view_base: Callable[[torch.Tensor], Any] = attrgetter("_base")
schema_of: Callable[[Any], Any] = attrgetter("_schema")
overload_name: Callable[[Any], str] = attrgetter("_overloadname")
output_metadata: Callable[[Any], Any] = attrgetter("_input_metadata")
submodules_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter("_modules")
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
forward_hooks_of: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
forward_pre_hooks_of: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
forward_hooks_with_kwargs: Callable[[torch.nn.Module], dict[int, bool]] = attrgetter("_forward_hooks_with_kwargs")
forward_pre_hooks_with_kwargs: Callable[[torch.nn.Module], dict[int, bool]] = attrgetter(
    "_forward_pre_hooks_with_kwargs"
)
forward_hooks_always_called: Callable[[torch.nn.Module], dict[int, bool]] = attrgetter("_forward_hooks_always_called")
backward_pre_hooks_of: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_backward_pre_hooks")
backward_hooks_of: Callable[[Any], dict[int, Any] | None] = attrgetter("_backward_hooks")
post_accumulate_hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
apply_to_tensors = torch.nn.Module._apply
original_of: Callable[[torch.nn.Module], torch.nn.Module] = attrgetter("_orig_mod")
compiled_call_of: Callable[[torch.nn.Module], Any] = attrgetter("_compiled_call_impl")

__all__ = [
    "AnyBatchNorm", "AnyInstanceNorm", "apply_to_tensors", "backward_hooks_of", "backward_pre_hooks_of",
    "buffers_of", "COLLECTIVES", "compiled_call_of", "COMPILER_TYPES", "current_function_mode",
    "current_graph_task_id", "DeviceContext", "disable_current_modes", "DisableAutocast", "DisableFuncTorch",
    "DisableTorchDispatch", "DisableTorchFunction", "DisableTorchFunctionSubclass", "dispatch_modes", "engine_code",
    "execution_engine", "FakeTensor",
    "FakeTensorMode", "foreach_add_", "foreach_copy_", "foreach_div", "foreach_div_", "foreach_mul_",
    "forward_hooks_always_called", "forward_hooks_of", "forward_hooks_with_kwargs", "forward_pre_hooks_of",
    "forward_pre_hooks_with_kwargs", "free_weak_storage", "function_modes", "global_module_hooks",
    "has_any_global_hook", "has_storage",
    "innermost_transform", "is_any_autocast_enabled", "is_functorch_wrapped_tensor",
    "is_torch_function_mode_enabled", "is_traceable_wrapper_subclass", "key_of", "len_torch_dispatch_stack",
    "len_torch_function_stack", "make_wrapper_subclass", "OpOverload", "OpOverloadPacket", "OptimizedModule",
    "original_of", "output_metadata", "overload_name", "parameters_of", "pop_saved_tensors_hooks",
    "post_accumulate_hooks_of", "preserve_version_counter", "privateuse1_backend_name", "ProfilerConfig",
    "ProfilerEventType", "push_saved_tensors_hooks", "pynvml_handler", "pytree", "register_device_module",
    "saved_tensors_hooks_enabled", "schema_of", "submodules_of", "top_saved_tensors_hooks", "TorchDispatchMode",
    "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten", "user_cache_dir",
    "version_counter", "view_base",
]  # fmt: skip
