"""Every private name of torch that the package uses: why, on which version it was checked, what breaks without it.

Other modules import from here what has no public counterpart, under a public name. The table :data:`PRIVATE_NAMES` is
what an upgrade of torch is checked against: a test resolves every entry and fails with the name that is gone. Beside
this file only the names of operators and of autograd nodes (``torch.ops.aten._x``, ``node._saved_x``) stand where they
are used: in the recipes and in the tables of costs, one entry of which describes one operator.
"""

import inspect
import types as python_types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import _appdirs
from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrame
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import graph as _graph
from torch.distributed import distributed_c10d as _c10d
from torch.nn.modules import module as _nn_module
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.nn.utils import parametrize as _parametrize
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One private name of another library.

    Attributes:
        why: What it gives us that no public name gives.
        without: What breaks when an upgrade takes it away.
        checked_on: The version on which it was last seen to work.
    """

    why: str
    without: str
    checked_on: str = "torch 2.13.0"


_MODES = "steps that we watch or repeat run under modes, and must neither see nor disturb the user's"
_HOOKS_OF_MODULES = "modules keep their hooks in dicts without a public reader"
_PARTS = "a module's own dicts: the public iterators compute names on the way, which costs a third of a walk"

# Keys are expressions: one makes a module or a graph where only an instance has the attribute.
PRIVATE_NAMES: dict[str, PrivateName] = {
    "torch.utils._pytree": PrivateName(
        why="nested outputs and batches are mapped over, of any registered container",
        without="batches, outputs and saved values in containers cannot be moved or compared",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": PrivateName(
        why="sees every operator of a step: its memory, its cost, its draws from generators",
        without="no profile and no plan can be made",
    ),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": PrivateName(
        why="tells tensors that are made of other tensors (DTensor, quantized) from plain ones",
        without="such parameters would be copied as if they were plain",
    ),
    "torch.utils._python_dispatch._disable_current_modes": PrivateName(
        why=_MODES, without="a profile would count its own work"
    ),
    "torch.nn.utils.parametrize._cache_enabled": PrivateName(
        why="copies of a parametrized module share the cache of one process, each finds the other's weights there",
        without="replicas in threads get gradients of one another where a step caches parametrizations",
    ),
    "torch.overrides._get_current_function_mode": PrivateName(
        why=_MODES, without="a shift could not tell whether it is the innermost mode"
    ),
    "torch.overrides._get_current_function_mode_stack": PrivateName(
        why=_MODES, without="calls under the user's function modes would be replayed without them"
    ),
    "torch._subclasses.fake_tensor.FakeTensor": PrivateName(
        why="values without memory, of which nothing may be kept or read",
        without="dry plans, and modules that are traced by others, are mistaken for real ones",
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": PrivateName(
        why="runs a step without its memory", without="no plan for a device that is not there"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": PrivateName(
        why="a compiled module is not its own class", without="compiled modules are not recognized"
    ),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": PrivateName(
        why="no public name tells in which dtype a unit computes, nor what it gathers",
        without="modules that fully_shard has spread cannot be planned",
    ),
    "torch.distributed.fsdp.FullyShardedDataParallel._flat_param": PrivateName(
        why="the parameters of a unit, of which no public name tells the shapes",
        without="modules that FSDPStrategy has wrapped cannot be planned",
    ),
    "torch.distributed.fsdp._flat_param.FlatParameter._init_metadata": PrivateName(
        why="what it writes (_param_infos, _shapes, _shared_param_infos) tells names and shapes of parameters",
        without="modules that FSDPStrategy has wrapped cannot be planned",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": PrivateName(
        why="no public name tells what a rank holds of a parameter, and when it is whole",
        without="what ranks of FSDP2 take cannot be predicted",
    ),
    "torch.testing._internal.distributed.fake_pg.FakeStore": PrivateName(
        why="a process group whose other ranks are not there has no public store",
        without="what ranks of FSDP2 take cannot be predicted",
    ),
    "torch.nn.Module._apply": PrivateName(
        why="that of a sharded module goes on to its sharded parameters",
        without="modules that fully_shard has spread cannot be planned",
    ),
    "torch.compile(torch.nn.Module(), backend='eager')._orig_mod": PrivateName(
        why="what a compiled module was made of", without="calls of compiled modules cannot be replayed"
    ),
    "torch._dynamo.eval_frame._TorchDynamoContext": PrivateName(
        why="replicas share what compiles, and so its code", without="every replica compiles its own code"
    ),
    "torch._dynamo.convert_frame.CatchErrorsWrapper": PrivateName(
        why="likewise: a part of it", without="every replica compiles its own code"
    ),
    "torch._dynamo.convert_frame.ConvertFrame": PrivateName(
        why="likewise: a part of it", without="every replica compiles its own code"
    ),
    "torch._ops.OpOverload": PrivateName(
        why="operators are no state of a module", without="modules that hold an operator cannot be replicated"
    ),
    "torch._ops.OpOverloadPacket": PrivateName(
        why="as OpOverload", without="modules that hold an operator cannot be replicated"
    ),
    "torch._utils._flatten_dense_tensors": PrivateName(
        why="joins thousands of gradients in one call", without="reductions take about twice their host time"
    ),
    "torch._utils._unflatten_dense_tensors": PrivateName(
        why="takes a pack apart in one call", without="reductions take about twice their host time"
    ),
    # torch's own optimizers work on lists with these, and they have no public names.
    "torch._foreach_add_": PrivateName(
        why="adds lists of gradients in one call", without="gradients would be added one by one"
    ),
    "torch._foreach_copy_": PrivateName(
        why="copies lists in one call", without="parameters would be copied one by one"
    ),
    "torch._foreach_div": PrivateName(
        why="averages lists in one call", without="gradients would be divided one by one"
    ),
    "torch._foreach_div_": PrivateName(why="as _foreach_div", without="gradients would be divided one by one"),
    "torch._foreach_mul_": PrivateName(why="as _foreach_div", without="gradients would be scaled one by one"),
    "torch.nn.modules.batchnorm._BatchNorm": PrivateName(
        why="the class of all batch norms, also those of libraries", without="their statistics are not recognized"
    ),
    "torch.nn.modules.instancenorm._InstanceNorm": PrivateName(
        why="the class of all instance norms", without="their statistics are not recognized"
    ),
    "torch.nn.modules.batchnorm._BatchNorm._check_input_dim": PrivateName(
        why="each batch norm has its own words for a wrong input",
        without="the batch norm over replicas cannot refuse an input as the original does",
    ),
    "torch.nn.modules.module._has_any_global_hook": PrivateName(
        why="global hooks see every call", without="calls would be replayed although a hook watches them"
    ),
    "torch.autograd.graph._engine_run_backward": PrivateName(
        why="its frame tells that a value is made inside a backward; it spares torch.autograd.backward's checks",
        without="memory of the backward would be counted as the forward's, and K losses cost 5 us each",
    ),
    "torch.autograd.Variable._execution_engine.run_backward": PrivateName(
        why="enters the engine without torch's Python, for backwards of nothing that end others",
        without="after an error another device's backward could still write gradients",
    ),
    "torch.autograd.Variable._execution_engine.queue_callback": PrivateName(
        why="tells the end of a backward", without="what a backward fetched ahead would stay when it ends early"
    ),
    "torch.cuda._get_pynvml_handler": PrivateName(
        why="NVML's handle of a CUDA device", without="other processes' share of a device's memory is not known"
    ),
    "torch.distributed.distributed_c10d._get_default_store": PrivateName(
        why="the store of the default group", without="processes that are lost cannot be named"
    ),
    "torch._appdirs.user_cache_dir": PrivateName(
        why="where torch keeps compiled extensions", without="simulated devices would be compiled in another folder"
    ),
    "torch._register_device_module": PrivateName(
        why="torch.sim", without="simulated devices cannot be counted or asked for their memory"
    ),
    "torch.Tensor._make_wrapper_subclass": PrivateName(
        why="a tensor without data of its own, on another device", without="attributes cannot follow lazily"
    ),
    "torch.Tensor._cdata": PrivateName(
        why="the identity of the tensor behind its Python object, which autograd may make anew",
        without="saved tensors are not recognized",
    ),
    "torch.UntypedStorage._cdata": PrivateName(
        why="the identity of a storage", without="views and what they share memory with are not recognized"
    ),
    "torch.UntypedStorage._weak_ref": PrivateName(
        why="knows of a storage without keeping it", without="plans would keep what they are there to free"
    ),
    "torch.UntypedStorage._free_weak_ref": PrivateName(why="ends a _weak_ref", without="weak references would leak"),
    "torch.autograd._unsafe_preserve_version_counter": PrivateName(
        why="buffers are shown to hooks between a forward and its backward, which still needs them as they were",
        without="such hooks would find the buffers of the first slice",
    ),
    "torch.Tensor._version": PrivateName(
        why="counts writes in place", without="changed parameters are not sent to the replicas"
    ),
    "torch.Tensor._base": PrivateName(why="what a view looks at", without="memory of views would be counted twice"),
    "torch.Tensor._is_view": PrivateName(why="as _base", without="memory of views would be counted twice"),
    "torch.Tensor._backward_hooks": PrivateName(
        why="tensors keep their hooks without a public reader", without="hooks set during a fit are not followed"
    ),
    "torch.Tensor._post_accumulate_grad_hooks": PrivateName(
        why="as _backward_hooks", without="hooks set during a fit are not followed"
    ),
    "torch.ops.aten.add.Tensor._schema": PrivateName(
        why="which inputs an operator writes", without="writes in place are not noticed"
    ),
    "torch.ops.aten.add.Tensor._overloadname": PrivateName(
        why="the name of an operator's variant", without="draws from generators are not recognized"
    ),
    "torch.nn.Module()._modules": PrivateName(why=_PARTS, without="replicas cannot be followed"),
    "torch.nn.Module()._parameters": PrivateName(why=_PARTS, without="replicas cannot be followed"),
    "torch.nn.Module()._buffers": PrivateName(why=_PARTS, without="buffers cannot be put back or followed"),
    "torch.nn.Module()._forward_hooks": PrivateName(why=_HOOKS_OF_MODULES, without="hooks are not followed"),
    "torch.nn.Module()._forward_pre_hooks": PrivateName(why=_HOOKS_OF_MODULES, without="hooks are not followed"),
    "torch.nn.Module()._backward_hooks": PrivateName(why=_HOOKS_OF_MODULES, without="hooks are not followed"),
    "torch.nn.Module()._backward_pre_hooks": PrivateName(why=_HOOKS_OF_MODULES, without="hooks are not followed"),
    "torch.nn.Module()._forward_hooks_with_kwargs": PrivateName(
        why=_HOOKS_OF_MODULES, without="hooks lose their keyword arguments"
    ),
    "torch.nn.Module()._forward_pre_hooks_with_kwargs": PrivateName(
        why=_HOOKS_OF_MODULES, without="hooks lose their keyword arguments"
    ),
    "torch.nn.Module()._forward_hooks_always_called": PrivateName(
        why=_HOOKS_OF_MODULES, without="hooks that run after errors, too, would not"
    ),
    "torch.nn.Module()._compiled_call_impl": PrivateName(
        why="module.compile() leaves its class as it is", without="compiled modules are not recognized"
    ),
    "(torch.ones(1, requires_grad=True) * 1).grad_fn._input_metadata": PrivateName(
        why="shape, dtype and device of a node's output, without unpacking what it saved",
        without="recipes would have to unpack saved values to look at them",
    ),
    "torch._C.DisableTorchFunction": PrivateName(
        why=_MODES, without="our own looks at tensors are taken for the user's"
    ),
    "torch._C.DisableTorchFunctionSubclass": PrivateName(
        why="looks at subclasses as plain tensors", without="lazily moved attributes recurse for ever"
    ),
    "torch._C._DisableTorchDispatch": PrivateName(
        why=_MODES, without="measured allocations would include those of the mode that measures"
    ),
    "torch._C._DisableFuncTorch": PrivateName(
        why="generator states are no values of a transform", without="steps under torch.func fail on dropout"
    ),
    "torch._C._DisableAutocast": PrivateName(
        why="replays run in the types of the first run", without="recomputed values have other types"
    ),
    "torch._C._is_any_autocast_enabled": PrivateName(
        why="whether _DisableAutocast is needed", without="every replay would pay for it"
    ),
    "torch._C._is_torch_function_mode_enabled": PrivateName(
        why="whether DisableTorchFunction is needed", without="every replay would pay for it"
    ),
    "torch._C._len_torch_dispatch_stack": PrivateName(
        why=_MODES, without="calls under the user's modes would be replayed without them"
    ),
    "torch._C._len_torch_function_stack": PrivateName(
        why=_MODES, without="calls under the user's modes would be replayed without them"
    ),
    "torch._C._current_graph_task_id": PrivateName(
        why="whether, and in which, backward this thread is", without="prefetching cannot tell two backwards apart"
    ),
    "torch._C._storage_Use_Count": PrivateName(
        why="whether anybody else holds the memory of what a collective gave, and may write to it",
        without="a replay may be given what others have written to",
    ),
    "torch._C._has_storage": PrivateName(
        why="some tensors have none, and raise when asked for it", without="offloading fails on them"
    ),
    "torch._C._get_privateuse1_backend_name": PrivateName(
        why="who has taken the one name for other backends", without="simulated devices would take another's place"
    ),
    "torch._C._functorch.is_functorch_wrapped_tensor": PrivateName(
        why="values of a transform cannot be kept", without="plans break steps that use torch.func"
    ),
    "torch._C._functorch.peek_interpreter_stack": PrivateName(
        why="whether a transform runs around a planned module",
        without="forwards under torch.vmap and jvp teach a plan that nothing is dropped",
    ),
    "torch._C._autograd._top_saved_tensors_default_hooks": PrivateName(
        why="the user's hooks of saved tensors, for other threads", without="they do not reach the replicas"
    ),
    "torch._C._autograd._push_saved_tensors_default_hooks": PrivateName(
        why="hooks for one call, at a tenth of the context manager's time", without="planned steps are slower"
    ),
    "torch._C._autograd._pop_saved_tensors_default_hooks": PrivateName(
        why="as _push_saved_tensors_default_hooks", without="planned steps are slower"
    ),
    "torch._C._autograd._saved_tensors_hooks_is_enabled": PrivateName(
        why="torch.func forbids such hooks", without="plans break steps that use torch.func"
    ),
    "torch.autograd._profiler_enabled": PrivateName(
        why="one profiler at a time", without="an account of allocations would end the user's profile"
    ),
    "torch.autograd._enable_profiler_legacy": PrivateName(
        why="sees allocations inside of operators", without="scratch memory of kernels is estimated, not measured"
    ),
    "torch.autograd._disable_profiler_legacy": PrivateName(
        why="as _enable_profiler_legacy", without="scratch memory of kernels is estimated, not measured"
    ),
    "torch._C._profiler._ExperimentalConfig": PrivateName(
        why="profile_all_threads", without="a profile shows nothing of replicas in threads"
    ),
    "torch._C._profiler._EventType": PrivateName(
        why="tells allocations from other events", without="dpx bench plan cannot measure peaks"
    ),
    "torch._dynamo.config": PrivateName(
        why="limits of recompilation", without="dpx bench plan --compile falls back to eager without a word"
    ),
    "torch._dynamo.optimize": PrivateName(
        why="one compiler for several functions, apart from the code that they have already",
        without="plans cannot tell compiled parts to save less",
    ),
    "torch._dynamo.eval_frame.innermost_backend": PrivateName(
        why="what compiles a function, to have it do so again", without="likewise"
    ),
    "torch._dynamo.optimize(backend='eager')._dynamic": PrivateName(
        why="a setting of a compiled function, likewise", without="likewise"
    ),
    "torch._dynamo.list_backends": PrivateName(why="names for an error", without="dpx bench plan --compile-backend"),
    "torch._dynamo.lookup_backend": PrivateName(why="checks a name", without="dpx bench plan --compile-backend"),
    "torch._functorch.config": PrivateName(
        why="activation_memory_budget has no argument", without="dpx bench plan --compile BUDGET"
    ),
    "torch._inductor.cpp_builder.get_cpp_compiler": PrivateName(
        why="whether Inductor can compile here", without="dpx bench plan --compile fails late"
    ),
}

# ---- classes and functions, under public names ----

# Bound once, here: other files import what they use under names without an underscore.
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_

DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchDispatch = torch._C._DisableTorchDispatch
DisableFuncTorch = torch._C._DisableFuncTorch
DisableAutocast = torch._C._DisableAutocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled
len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
len_torch_function_stack = torch._C._len_torch_function_stack
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
has_storage = torch._C._has_storage
privateuse1_backend_name = torch._C._get_privateuse1_backend_name
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack

top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks
saved_tensors_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_dtensor", "symm_mem"}
)  # namespaces of operators of several processes

# What turns a function into compiled code: the settings of torch.compile, and what it calls for a frame.
COMPILER_TYPES: tuple[type, ...] = (_TorchDynamoContext, CatchErrorsWrapper, ConvertFrame)

# The public profiler takes these as they are, and has no names for them.
ProfilerConfig = torch._C._profiler._ExperimentalConfig
ProfilerEventType = torch._C._profiler._EventType
execution_engine: Any = torch.autograd.Variable._execution_engine
# Compared with the code of frames, which is the same object in every call.
engine_code = _graph._engine_run_backward.__code__
has_any_global_hook: Callable[[], bool] = _nn_module._has_any_global_hook
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


def parametrizations_are_cached() -> bool:
    """Whether this is inside of ``torch.nn.utils.parametrize.cached()``, in any thread."""
    return _parametrize._cache_enabled > 0


def run_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` for gradients that are known to have the shapes of their tensors.

    Its checks of that, in Python, are a third of the time of a small backward: 20 of 60 us for four losses.
    """
    if is_torch_function_mode_enabled() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        torch.autograd.backward(tensors, gradients)  # modes and subclasses have a say in it
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    # The two flags are those of torch.autograd.backward: keep no graph, and make none
    # of the backward.
    _graph._engine_run_backward(tuple(tensors), tuple(gradients), False, False, (), **options)


def is_in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` has what autograd saves right now, and counts on the same once more."""
    top = top_saved_tensors_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == checkpoint.__name__


def is_view(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` looks at the memory of another one."""
    return tensor._is_view()


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """A reference that keeps no memory; :data:`free_weak_storage` ends it."""
    return storage._weak_ref()


def check_input_dim(norm: AnyBatchNorm, values: torch.Tensor) -> None:
    """A batch norm's own check of its input.

    Raises:
        ValueError: it has another number of dimensions than this kind of batch norm takes.
    """
    norm._check_input_dim(values)  # type: ignore[no-untyped-call]


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes ``tensor`` one that ``isinstance`` takes for a parameter, as ``nn.Parameter`` does with subclasses."""
    # `nn.Parameter` asks for this attribute when it is asked whether a tensor is one.
    tensor._is_param = True  # type: ignore[attr-defined]


def profiler_is_enabled() -> bool:
    """Whether a profiler runs in this thread."""
    running: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return running


def has_legacy_profiler() -> bool:
    """Whether this torch has the older profiler."""
    # Asked before it is used, as it is the older one of two and may go.
    return hasattr(torch.autograd, "_enable_profiler_legacy")


def start_legacy_profiler(config: Any) -> None:
    """Starts the older profiler in this thread."""
    torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]


def end_legacy_profiler() -> Any:
    """Ends it; returns its events, a list per thread."""
    return torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]


def precision_policy_of(module: torch.nn.Module) -> Any:
    """The ``MixedPrecisionPolicy`` of a unit of ``fully_shard``; ``None`` for any other module."""
    # Only units that `fully_shard` has made have the method.
    read_state = getattr(module, "_get_fsdp_state", None)
    if read_state is None:
        return None
    return getattr(read_state(), "_mp_policy", None)


FLAT_PARAMETER = "_flat_param"  # its name in the unit, where use_orig_params is False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParts:
    """The parameters that ``FullyShardedDataParallel`` keeps in one.

    Attributes:
        unit: The module whose they are.
        names: Modules in it, and the name of a parameter there; of a tied one all of them.
        shapes: Of each, before it was sharded.
        requires_grad: Whether the one that they are kept in does, and so all do in a step: as soon as one is trained.
        same: For each, the number of the one that it is tied to, or its own.
        dtype: What they are gathered in.
        policy: The ``MixedPrecision`` of the unit.
    """

    unit: torch.nn.Module
    names: list[tuple[torch.nn.Module, str]]
    shapes: list[torch.Size]
    requires_grad: bool
    same: list[int]
    dtype: torch.dtype
    policy: Any


def flat_parts_of(wrapper: Any) -> FlatParts:
    """The parameters of one unit of ``FullyShardedDataParallel``, none where others have them all."""
    flat = wrapper._flat_param
    policy = wrapper.mixed_precision
    kept = torch.float32 if flat is None else flat.dtype
    parts = FlatParts(
        unit=wrapper.module,
        names=[],
        shapes=[],
        requires_grad=_is_trained(flat),
        same=[],
        dtype=policy.param_dtype or kept,
        policy=policy,
    )
    if flat is None:
        return parts
    written = vars(flat)
    for info, shape in zip(written["_param_infos"], written["_shapes"], strict=True):
        parts.same.append(len(parts.names))
        parts.names.append((info.module, info.param_name))
        parts.shapes.append(shape)
    for info in written["_shared_param_infos"]:
        first = parts.names.index((info.prim_module, info.prim_param_name))
        parts.same.append(first)
        parts.names.append((info.module, info.param_name))
        parts.shapes.append(parts.shapes[first])
    return parts


def _is_trained(flat: Any) -> bool:
    """Whether a flat parameter will require grad in the next forward."""
    if flat is None:
        return False
    own = []
    for info in vars(flat)["_param_infos"]:
        parameter = info.module._parameters.get(info.param_name)
        if parameter is not None:
            own.append(parameter.requires_grad)
    # With use_orig_params the user's own parameters say so, and the flat one is told when a forward begins.
    if own:
        return any(own)
    return bool(flat.requires_grad)


def sharded_parameters(module: torch.nn.Module) -> list[Any]:
    """What ``fully_shard`` keeps of every parameter of the units in ``module``, each once."""
    found: dict[int, Any] = {}
    for child in module.modules():
        for parameter in _sharded_parameters_of(child):
            found[id(parameter)] = parameter
    return list(found.values())


def _sharded_parameters_of(unit: torch.nn.Module) -> list[Any]:
    """What ``fully_shard`` keeps of the parameters of one unit; nothing for any other module."""
    read_state = getattr(unit, "_get_fsdp_state", None)
    if read_state is None:
        return []
    state = read_state()
    # Torch 2.12 and before have one group for a unit, under another name.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    found = []
    for group in groups:
        if group is not None:
            found += group.fsdp_params
    return found


def gathered_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """What parameters of ``fully_shard`` are in a forward of their unit, by the ids of those that modules have now.

    They are on the meta device, in the dtype that the unit computes in. Of one that is tensor-parallel as well, it is
    the part of this rank.
    """
    found: dict[int, torch.nn.Parameter] = {}
    for child in module.modules():
        policy = precision_policy_of(child)
        for one in _sharded_parameters_of(child):
            sharded = one.sharded_param
            dtype = sharded.dtype
            # A unit may hold whole numbers, which it gathers as they are.
            if policy is not None and policy.param_dtype is not None and dtype.is_floating_point:
                dtype = policy.param_dtype
            # An attribute that only instances have, so that it is in no table of names.
            whole = torch.empty(vars(one)["_orig_size"], dtype=dtype, device="meta")
            found[id(sharded)] = torch.nn.Parameter(_as_part(whole, one), sharded.requires_grad)
    return found


def _as_part(whole: torch.Tensor, sharded: Any) -> torch.Tensor:
    """``whole`` as the part of a tensor-parallel parameter, if ``sharded`` is one."""
    # Torch 2.12 and before have it under another name, and only where there is one.
    spec = getattr(sharded, "_unsharded_dtensor_spec", getattr(sharded, "_tp_spec", None))
    if spec is None:
        return whole
    return _distributed(whole, spec.mesh, spec)


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A distributed tensor (DTensor) like ``tensor``, of which this process has ``part``."""
    like: Any = tensor.detach()
    made = _distributed(part, like.device_mesh, like)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made


def _distributed(part: torch.Tensor, mesh: Any, like: Any) -> torch.Tensor:
    # Slow to import, and there already where it is needed.
    from torch.distributed.tensor import DTensor

    stride = like.stride() if callable(like.stride) else like.stride
    # No process is asked anything: all know the whole.
    made = DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=stride)
    return made.detach()


def shard_of(parameter: Any) -> torch.Tensor:
    """The part of one of :func:`sharded_parameters` that is here, flat, with what it is padded by."""
    # An attribute that only instances have, so that it is in no table of names.
    shard: torch.Tensor = vars(parameter)["_sharded_param_data"]
    return shard


def is_offloaded(parameter: Any) -> bool:
    """Whether one of :func:`sharded_parameters` has its part, and that of its gradient, on the host."""
    return bool(vars(parameter)["offload_to_cpu"])


def unpin(parameter: Any) -> None:
    """From now on one of :func:`sharded_parameters` is not moved to pinned memory."""
    parameter.pin_memory = False


def gathered_bytes(parameters: Sequence[Any]) -> int:
    """Bytes of those of :func:`sharded_parameters` that are whole now; torch resizes their storages unseen."""
    total = 0
    for parameter in parameters:
        # There are none before the first forward.
        for whole in getattr(parameter, "all_gather_outputs", ()):
            total += whole.untyped_storage().nbytes()
    return total


def reset_sharded(parameter: Any) -> None:
    """One of :func:`sharded_parameters` takes the tensor that its module has now, as before its first forward."""
    parameter.reset_sharded_param()
    parameter.all_gather_outputs = []
    # A view of those, which the next forward makes anew.
    vars(parameter).pop("_unsharded_param", None)


def fake_store() -> Any:
    """The store of a process group "fake", whose other ranks are not there and whose collectives do nothing."""
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()  # type: ignore[no-untyped-call]


def default_store() -> Any:
    """The store of the default process group."""
    return _c10d._get_default_store()  # type: ignore[attr-defined]


def dynamo_config() -> Any:
    """The settings of ``torch.compile``; slow to import, so only where they are used."""
    from torch._dynamo import config

    return config


def functorch_config() -> Any:
    """The settings of ``torch.compile``'s autograd, likewise."""
    from torch._functorch import config

    return config


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How a function was compiled.

    Attributes:
        function: What was compiled.
        backend: What compiles its graphs.
        fullgraph: Whether it has to be one graph.
        dynamic: Whether sizes may vary.
    """

    function: Any
    backend: Any
    fullgraph: bool
    dynamic: bool | None


def compile_settings_of(compiled: Any) -> CompileSettings | None:
    """How ``compiled`` was compiled, if ``torch.compile`` has made it."""
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    if original is None or not inspect.isfunction(compiled):
        return None
    context = inspect.getclosurevars(compiled).nonlocals.get("self")
    if not isinstance(context, _TorchDynamoContext):
        return None
    callback: Any = context.callback
    return CompileSettings(original, innermost_backend(callback), context.fullgraph, context._dynamic)


def compiler_apart(backend: Any, *, fullgraph: bool, dynamic: bool | None) -> Any:
    """Compiles functions; what it has compiled does not count among the recompilations of others.

    Torch 2.12 and before count all of them together.
    """
    from torch._dynamo import optimize

    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    return optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **apart)


def compile_backends() -> list[str]:
    """The names that ``torch.compile`` knows, likewise."""
    from torch._dynamo import list_backends

    return list(list_backends(exclude_tags=()))


def find_compile_backend(name: str) -> Any:
    """What compiles under ``name``, likewise."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def inductor_compiler() -> str:
    """The C++ compiler that Inductor uses, likewise."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def flatten_dense(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat copy of all elements, in order."""
    flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflatten_dense(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of the one-dimensional ``flat`` with the shapes of ``like``, in order."""
    views: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return views


_HOMES_OF_LAYOUT_HOOKS = ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.style")

# Under such names fully_shard and its like keep what they know of a module.
COMPOSABLE_STATE = "__composable_api_"


def is_layout_hook(hook: Any) -> bool:
    """Whether ``parallelize_module`` has registered it: it brings what a module is given, or gives, to another layout.

    What was given to ``distribute_module`` for that may do anything, unless it is torch's own. So may a style of the
    user's.
    """
    if getattr(hook, "__module__", "") not in _HOMES_OF_LAYOUT_HOOKS:
        return False
    for cell in getattr(hook, "__closure__", None) or ():
        given = getattr(cell.cell_contents, "func", cell.cell_contents)
        is_code = isinstance(given, python_types.FunctionType | python_types.MethodType)
        home = given.__module__ if is_code else type(given).__module__
        if not home.startswith("torch.distributed."):
            return False
    return True


def on_distributed_tensors(types: Any) -> bool:
    """Whether an operator takes tensors of which each process has a part (DTensor).

    A dispatch mode leaves it to them: what they then do with the parts, and between processes, comes to the mode again.
    """
    # By the name of the module, which need not be imported for it.
    return any(kind.__module__.startswith("torch.distributed.tensor") for kind in types)


def on_tensors_of_tensors(types: Any) -> bool:
    """Whether an operator takes tensors that are made of others, such as jagged, distributed or quantized ones.

    They have no memory of their own. A dispatch mode leaves the operator to them: what they then do with the tensors
    that they hold comes to the mode again.
    """
    # Of an operator on plain tensors there are no types to look at.
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def with_memory_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that ``tensor`` is made of; itself, as a rule."""
    # Nearly all tensors are plain, and their type tells without a call.
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    found: list[torch.Tensor] = []
    # Not the shapes: of the outer tensor they tell nothing about the memory of the inner ones.
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        held = getattr(tensor, name)
        if isinstance(held, torch.Tensor):
            # One wrapper may hold another, such as a DTensor whose parts are quantized.
            found += with_memory_in(held)
    return found


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor than ``tensor`` holds its memory."""
    storage = tensor.untyped_storage()
    # Of them one is ``tensor``, and one is the storage object itself.
    return int(torch._C._storage_Use_Count(key_of(storage))) > 2


__all__ = [
    "AnyBatchNorm", "AnyInstanceNorm", "apply_to_tensors", "backward_hooks_of", "backward_pre_hooks_of",
    "buffers_of", "check_input_dim", "COLLECTIVES", "compile_backends", "compile_settings_of", "compiled_call_of",
    "compiler_apart", "COMPILER_TYPES", "CompileSettings", "COMPOSABLE_STATE", "current_function_mode",
    "current_graph_task_id",
    "default_store", "disable_current_modes", "DisableAutocast", "DisableFuncTorch", "DisableTorchDispatch",
    "DisableTorchFunction", "DisableTorchFunctionSubclass", "dynamo_config", "end_legacy_profiler", "engine_code",
    "execution_engine", "fake_store", "FakeTensor", "FakeTensorMode", "find_compile_backend", "flatten_dense",
    "foreach_add_", "foreach_copy_", "foreach_div", "foreach_div_", "foreach_mul_", "forward_hooks_always_called",
    "forward_hooks_of", "forward_hooks_with_kwargs", "forward_pre_hooks_of", "forward_pre_hooks_with_kwargs",
    "free_weak_storage", "function_modes", "functorch_config", "gathered_bytes", "gathered_parameters",
    "has_any_global_hook", "has_legacy_profiler", "has_storage", "inductor_compiler", "innermost_transform",
    "is_any_autocast_enabled", "is_functorch_wrapped_tensor", "is_in_checkpoint", "is_layout_hook", "is_offloaded",
    "is_torch_function_mode_enabled",
    "is_traceable_wrapper_subclass", "is_view", "key_of", "len_torch_dispatch_stack", "len_torch_function_stack",
    "make_wrapper_subclass", "mark_as_parameter", "on_distributed_tensors", "on_tensors_of_tensors", "OpOverload",
    "OpOverloadPacket", "OptimizedModule", "original_of", "output_metadata", "overload_name", "parameters_of",
    "parametrizations_are_cached",
    "pop_saved_tensors_hooks", "post_accumulate_hooks_of", "precision_policy_of", "preserve_version_counter",
    "PRIVATE_NAMES", "PrivateName",
    "privateuse1_backend_name", "profiler_is_enabled", "ProfilerConfig", "ProfilerEventType",
    "push_saved_tensors_hooks", "pynvml_handler", "pytree", "register_device_module", "reset_sharded",
    "run_backward", "saved_tensors_hooks_enabled", "schema_of", "shard_of", "sharded_parameters", "shares_memory",
    "start_legacy_profiler", "submodules_of", "top_saved_tensors_hooks", "TorchDispatchMode", "tree_flatten",
    "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten", "unflatten_dense", "unpin", "user_cache_dir",
    "version_counter", "view_base", "weak_storage", "with_memory_in", "with_part",
]  # fmt: skip
