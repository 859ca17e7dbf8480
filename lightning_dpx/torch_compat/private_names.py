"""The table of all private names of torch that the package uses: what an upgrade of torch is checked against."""

from dataclasses import dataclass


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
_HOOKS_OF_ALL = "hooks of all modules are in dicts without a public reader"
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
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": PrivateName(
        why=_MODES, without="replicas in threads would run without the user's dispatch modes"
    ),
    "torch.utils._device.DeviceContext": PrivateName(
        why="tells torch.set_default_device from other function modes",
        without="every replica makes its new tensors on the device of the first",
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
    "torch.nn.modules.module._global_forward_pre_hooks": PrivateName(
        why=_HOOKS_OF_ALL, without="what hooks of all modules keep is not looked at"
    ),
    "torch.nn.modules.module._global_forward_hooks": PrivateName(
        why=_HOOKS_OF_ALL, without="what hooks of all modules keep is not looked at"
    ),
    "torch.nn.modules.module._global_backward_pre_hooks": PrivateName(
        why=_HOOKS_OF_ALL, without="what hooks of all modules keep is not looked at"
    ),
    "torch.nn.modules.module._global_backward_hooks": PrivateName(
        why=_HOOKS_OF_ALL, without="what hooks of all modules keep is not looked at"
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
    "torch.Tensor._indices": PrivateName(
        why="the memory of a sparse tensor that is not coalesced", without="budgets on the host refuse sparse tensors"
    ),
    "torch.Tensor._values": PrivateName(why="as _indices", without="budgets on the host refuse sparse tensors"),
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
    "torch.nn.Module()._is_full_backward_hook": PrivateName(
        why="whether backward hooks get gradients of the module or of its last node",
        without="backward hooks that come during a fit do something else on other replicas",
    ),
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
    "torch._C._autograd._get_sequence_nr": PrivateName(
        why="which nodes of a step compiled code has made", without="plans exceed their budget behind compiled parts"
    ),
    "torch.autograd.graph.Node._sequence_nr": PrivateName(why="likewise", without="likewise"),
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
    "torch._dynamo.optimize(backend='eager').enter_exit_hooks": PrivateName(
        why="tells of the calls of compiled functions", without="no budget is met beside them"
    ),
    "torch._dynamo.trace_rules": PrivateName(
        why="the compiler leaves code alone that compiled code calls, such as hooks of tensors that it saves",
        without="budgets fail beside functions that are compiled where they are defined",
    ),
    "torch._dynamo.symbolic_convert.tls": PrivateName(
        why="whether a graph that is traced may break, at hooks that only look at steps",
        without="fullgraph=True is refused for models whose plan keeps everything",
    ),
    "torch._dynamo.decorators._dynamo_static_input_type": PrivateName(
        why="whether compiled code uses a parameter",
        without="nothing is told of code that was compiled before a plan was put on, and does not follow it",
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
