"""What Lightning calls, each hook in one line: the base class of :class:`DPXStrategy`.

What the hooks do is in ``lifecycle.py`` (before and after steps), ``session.py`` (steps on replicas), ``run.py`` (on
one device) and ``ranks.py`` (who is who).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lightning_dpx.errors import ConfigurationError, ReplicationError
from lightning_dpx.lightning.adoption import Adoption
from lightning_dpx.lightning.checkpoint_io import with_whole_files
from lightning_dpx.lightning.compiled_whole import CompiledWhole
from lightning_dpx.lightning.launcher import InThisProcess
from lightning_dpx.lightning.lifecycle import Lifecycle
from lightning_dpx.lightning.lightning_api import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    ParallelStrategy,
    Precision,
    Strategy,
    pl,
    rank_zero_info,
)
from lightning_dpx.lightning.lightning_compat import layer_sync_of, module_of
from lightning_dpx.lightning.manual.acts_once import OPEN_VIEWS, current_view
from lightning_dpx.lightning.options import StrategyOptions, Workload
from lightning_dpx.lightning.owners import place_states
from lightning_dpx.lightning.precision import DPXPrecision, wrap_precision
from lightning_dpx.lightning.processes.connect import with_nodes
from lightning_dpx.lightning.processes.stop import CoordinatedStop, NoStop
from lightning_dpx.lightning.ranks import Ranks
from lightning_dpx.lightning.run import OneDevice
from lightning_dpx.lightning.session import Session
from lightning_dpx.python_objects.compiled import state_named_as_in
from lightning_dpx.reducers import GradientReducer
from lightning_dpx.replicas import Slicer


class HookedStrategy(ParallelStrategy):
    """Hands every hook of Lightning on to the objects of a run, which a subclass makes before ``super().__init__()``.

    Attributes:
        options: What the user asked for.
        session: What the current run is made of ...
        one_device: ... and that of a run on one device, or of none.
        ranks: Who is who.
        lifecycle: Begins and ends runs.
        adoption: Whose Trainer's the strategy is.
        stopping: How several processes stop together.
        compiled_whole: Has Lightning take a module that is compiled as a whole.
    """

    options: StrategyOptions
    session: Session | OneDevice
    one_device: OneDevice
    ranks: Ranks
    lifecycle: Lifecycle
    adoption: Adoption
    stopping: CoordinatedStop | NoStop
    compiled_whole: CompiledWhole
    num_nodes = 1  # Lightning sets it
    _announced: set[str]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is between two runs, also of a strategy that is in one: threads and locks stay with the run."""
        between = {"session": self.one_device, "stopping": NoStop(), "hooks_mode": None, "module_in_use": None}
        return {**super().__getstate__(), **between}

    @property
    def replicated_session(self) -> Session:
        """The session of a run on replicas, for those who work for nothing else.

        Raises:
            ReplicationError: the run is on one device, or there is none.
        """
        if not isinstance(self.session, Session):
            raise ReplicationError("There are no replicas: the run is on one device, or has not begun or is over.")
        return self.session

    # ---- what was asked for ----

    @property
    def reducer(self) -> str | GradientReducer:
        """The reducer that was asked for, a name or an object."""
        return self.options.reducer

    @property
    def workload(self) -> Workload:
        """The workload that was asked for."""
        return self.options.workload

    @property
    def batch_dim(self) -> int | dict[str, int]:
        """The batch dim that was asked for, of all inputs or by path."""
        return self.options.batch_dim

    @property
    def batch_slicer(self) -> Slicer | Callable[[Any, list[int]], list[Any]] | None:
        """The slicer that was asked for; ``None`` for cutting along the batch dim."""
        return self.options.batch_slicer

    @property
    def micro_batches(self) -> int | list[int] | Literal["auto"]:
        """The number of micro-batches that was asked for."""
        given: Any = self.options.micro_batches
        return given  # type: ignore[no-any-return]

    # ---- what a Trainer sets and asks ----

    @property
    def _accelerator(self) -> Accelerator | None:
        """Lightning's own attribute; a new Trainer looks at it first of all."""
        # No hook tells a strategy object that a new Trainer has got it. The first thing a Trainer
        # does with one is to read this attribute, so the read is the signal.
        self.adoption.follow_caller()
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that was given, or one that writes whole files."""
        # The base class fills in its default here, on the first read, and so does this: until then
        # the Trainer looks at what the user gave.
        self._checkpoint_io = with_whole_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def precision_plugin(self) -> Precision:
        """Always a DPXPrecision round the plugin that was chosen."""
        if self._precision_plugin is not None:
            return self._precision_plugin
        return Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Trainer(precision=...) reaches a strategy through this setter alone. The base constructor
        # calls it once with None, so the options must be there before it runs.
        shifts = self.options.shifts_activations
        self._precision_plugin = wrap_precision(precision_plugin, self._after_backward, shifts=shifts)

    @property
    def dpx_precision(self) -> DPXPrecision:
        """The precision plugin as what the setter has made of it."""
        assert isinstance(self._precision_plugin, DPXPrecision), "the setter wraps every plugin"
        return self._precision_plugin

    @property
    def root_device(self) -> torch.device:
        """Where the user's module and the optimizer live: the first device."""
        if not self.parallel_devices:
            raise ConfigurationError("DPXStrategy has no devices; give Trainer(devices=...) at least one.")
        return self.parallel_devices[0]

    @property
    def _lightning_module(self) -> "pl.LightningModule | None":
        """Lightning's own attribute; a Trainer sets it just before it looks whether the module is compiled."""
        # A property comes before the instance dict, so the value can stay there under its own name.
        # It is missing until the base constructor has set it.
        module: pl.LightningModule | None = vars(self).get("_lightning_module")
        return module

    @_lightning_module.setter
    def _lightning_module(self, module: "pl.LightningModule | None") -> None:
        vars(self)["_lightning_module"] = module
        # Trainer.fit assigns the module and refuses a compiled one in its next statement: no hook
        # lies between. connect() assigns it again during the run, when nothing must be hidden.
        if not self.adoption.is_running:
            self.compiled_whole.hide(module)

    @property
    def lightning_module(self) -> "pl.LightningModule | None":
        """The user's module; inside a manual step of several replicas, that of the replica."""
        # Lightning reads this about 40 times a step: a list is faster to ask than a context variable, and the
        # instance dict than the property above, or than by vars() and get(), which are calls.
        if OPEN_VIEWS:
            view = current_view()
            if view is not None:
                return view.module  # type: ignore[no-any-return]
        module: pl.LightningModule | None = self.__dict__["_lightning_module"]
        return module

    @property
    def connected_module(self) -> "pl.LightningModule":
        """The user's module, once :meth:`connect` was called.

        Raises:
            ConfigurationError: no Trainer has called it.
        """
        module = module_of(self)
        if module is None:
            raise ConfigurationError("DPXStrategy has no module yet; a Trainer gives it one, as in trainer.fit(model).")
        return module

    @property
    def synchronizes_batch_norm(self) -> bool:
        """Whether ``Trainer(sync_batchnorm=True)`` was given."""
        return layer_sync_of(self) is not None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a DistributedSampler: they count processes, as replicas share one loader."""
        # ParallelStrategy counts devices here: the sampler would then leave out the rows of all but
        # one of K devices, as no other process reads them.
        return {"num_replicas": self.num_processes, "rank": self.process_rank}

    def set_world_ranks(self) -> None:
        """Where no launcher says otherwise, there is one process per node."""
        # The connector calls this right after it has set the environment and num_nodes.
        self.cluster_environment: ClusterEnvironment | None = with_nodes(self.cluster_environment, self.num_nodes)

    def announce(self, text: str) -> None:
        """Logs ``text`` on rank zero, once for each strategy object."""
        if text not in self._announced:
            self._announced.add(text)
            rank_zero_info(text)

    # ---- a replica inside a step, the process outside ----

    @property
    def num_processes(self) -> int:
        """Processes that train together, each with its own replicas."""
        return self.ranks.num_processes

    @property
    def process_rank(self) -> int:
        """The rank of this process among them."""
        return self.ranks.process_rank

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must deal the samples to several processes; replicas of one share its loader."""
        # Lightning asks custom strategies for this attribute to decide whether a loader
        # gets a DistributedSampler.
        return self.ranks.num_processes > 1

    @property
    def global_rank(self) -> int:
        """The replica's rank among all replicas inside a step, the process's rank outside."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """The replica's rank in its process inside a step, the process's on its machine outside."""
        return self.ranks.local_rank

    @property
    def world_size(self) -> int:
        """The replicas that take part in the step, or the processes."""
        return self.ranks.world_size

    def barrier(self, name: str | None = None) -> None:
        """Waits for the other replicas inside a step, for the other processes outside."""
        self.ranks.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of the one with rank ``src``."""
        return self.ranks.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (sum, min, max) over all."""
        return self.ranks.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(K, ...) from (...) of each of K."""
        return self.ranks.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) say yes."""
        return self.ranks.reduce_boolean_decision(decision, all)

    # ---- before and after steps: lifecycle.py ----

    def _configure_launcher(self) -> None:
        # Every run, and every failure of it, passes through the frame of the launcher: there is no
        # hook of a strategy that an error is certain to reach.
        self._launcher = InThisProcess(self.lifecycle.run_context, self.lifecycle.end_failed_run)

    def connect(self, model: "pl.LightningModule") -> None:
        """A run begins; what an earlier one has left, here or on the module, is cleared away first."""
        self.lifecycle.clear_earlier_run(model)
        super().connect(model)
        self.compiled_whole.show()

    def setup_environment(self) -> None:
        """Sets up the root device and joins the other processes, if there are any."""
        super().setup_environment()
        self.lifecycle.join_processes()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Lightning's, with its handlers of signals exchanged where there are several processes; then plans memory."""
        # Before the base class: the Trainer registers its signal handlers right after setup, so
        # they can still be exchanged here.
        self.lifecycle.begin_run(trainer)
        super().setup(trainer)
        place_states(self.optimizers, self.root_device)
        self.session.plan_ahead()

    def model_to_device(self) -> None:
        """Moves the user's module to the first device."""
        self.lifecycle.move_module()

    def _setup_model(self, model: Module) -> Module:
        # Strategy.setup calls this after moving the module and before making the optimizers, the
        # one moment at which replicas can be made.
        self.lifecycle.begin_session()
        return model

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """The user's optimizers, each over the copies of its parameters that the owners hold."""
        super().setup_optimizers(trainer)
        self.session.begin_optimizers()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Also from a file in which other submodules were compiled, with ``torch.compile(child)``, than are now."""
        # torch.compile(child) puts _orig_mod into the names below it, so a file depends on what was
        # compiled when it was saved.
        given = checkpoint["state_dict"]
        state = state_named_as_in(self.connected_module, given)
        if state is not given:
            self.announce("dpx: the checkpoint has _orig_mod in other names than the module: they are taken as equal.")
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of every parameter to where its owner is."""
        self.session.load_optimizer_states(super().load_optimizer_state_dict, checkpoint)

    def give_up_replicas(self) -> None:
        """Ends the workers and takes everything of a run off the module; does nothing where that has been done."""
        self.lifecycle.give_up_replicas()

    def teardown(self) -> None:
        """Ends the workers and gives up the replicas."""
        self.lifecycle.end_run()
        # Not that of ParallelStrategy, which asserts a cluster environment: one process
        # may have none.
        Strategy.teardown(self)

    def on_exception(self, exception: BaseException) -> None:
        """Adds notes to the error that say what would help, before Lightning raises it."""
        # The run may have failed before connect(), which would have done this.
        self.compiled_whole.show()
        self.lifecycle.explain_failure(exception)
        super().on_exception(exception)

    # ---- steps: session.py, on one device run.py ----

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """With several replicas the batch stays as the loader gave it; each replica moves its own slice."""
        return self.session.batch_to_device(super().batch_to_device, batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' training steps.

        Where the module has a method ``training_step_end(outputs)``, the replicas' outputs are merged in sample order
        and it computes the loss from those of the whole batch; gradients flow back through every replica.
        """
        return self.session.training.run(args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' validation steps, in sample order."""
        return self.session.evaluation.run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' test steps, in sample order."""
        return self.session.evaluation.run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged predictions, in sample order."""
        return self.session.evaluation.run("predict_step", args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's; in a manual step of several replicas, of every replica's part of the loss."""
        # manual_backward() on a replica: the graph is that of its slice, but the hooks round a
        # backward belong to the whole batch, so the replicas meet for them.
        if (view := current_view()) is not None:
            loss: Tensor = view.backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _after_backward(self) -> None:
        """Called by the precision plugin after its own backward."""
        self.session.training.after_backward()

    def block_backward_sync(self) -> Any:
        """Gradients stay on the replicas while they accumulate."""
        # Lightning enters this for batches that only accumulate, where DDP would enter no_sync().
        return self.session.accumulating()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps on the owners; the replicas follow before their next forward."""
        return self.session.step_optimizer(super().optimizer_step, optimizer, closure, model, kwargs)

    # ---- moments after which parameters may have been written without a trace, and processes meet ----

    def on_train_start(self) -> None:
        """Callbacks may have written parameters."""
        self.session.mark_changed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the start of an epoch, processes compare how many batches they have."""
        # Lightning has no hook of a strategy for the start of an epoch.
        if batch_idx == 0:
            self.lifecycle.begin_epoch()

    def on_train_end(self) -> None:
        """Other stages see what training left; a signal that came too late for its last step ends the run."""
        self.lifecycle.leave_training()
        self.stopping.end()

    def on_validation_start(self) -> None:
        """An evaluation begins, perhaps in the middle of training."""
        self.lifecycle.enter_evaluation()

    # All evaluations begin alike: they read what training has left.
    def on_test_start(self) -> None:
        """A test run begins."""
        self.on_validation_start()

    def on_predict_start(self) -> None:
        """A prediction run begins."""
        self.on_validation_start()

    def before_evaluation_batch(self) -> None:
        """Several processes may be told to stop between two batches."""
        self.stopping.before_batch()

    def on_validation_end(self) -> None:
        """Callbacks may have written parameters, and signals may have come."""
        self.session.mark_changed()
        self.stopping.meet_after_validation()

    def on_test_end(self) -> None:
        """Signals may have come."""
        self.stopping.end()

    on_predict_end = on_test_end
