"""What happens to a strategy round its steps, in this order: :class:`Lifecycle`.

    launch             hooks of the whole run in one context        run_context, end_failed_run
    connect            what an earlier run left goes                clear_earlier_run
    setup_environment  the other processes are joined               join_processes
    setup              signals; module to its device; replicas      begin_run, move_module, begin_session
    ... steps ...      between its stages                           begin_epoch, leave_training, enter_evaluation
    on_exception       what would help                              explain_failure
    teardown           workers end, the module is as it was         give_up_replicas, end_run

Lightning leaves the teardown out where a callback fails in ``on_exception``; what must not stay then ends with the
launch, or at the latest when the next run is connected.
"""

import signal
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import BudgetError, CollectiveError
from lightning_dpx.lightning.leftovers import begin_unshifted, leave, take_over
from lightning_dpx.lightning.lightning_api import SIGTERMException, pl
from lightning_dpx.lightning.lightning_compat import take_signals
from lightning_dpx.lightning.make_session import make_session
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.lightning.processes.connect import agree, connect, share
from lightning_dpx.lightning.processes.rank_zero import forget_steps, make_step_aware
from lightning_dpx.lightning.processes.stop import CoordinatedStop, NoStop
from lightning_dpx.python_objects.compiled import compiled_names, uncompiled
from lightning_dpx.reducers import declare_failed, describe_loss, is_loss_of_a_process, stop_roll_call
from lightning_dpx.shifting import BetweenSteps

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


class Lifecycle:
    """Begins and ends the runs of a strategy; what its methods do, in order, is at the head of this module.

    Args:
        strategy: Lightning's face of the runs.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        self._strategy = strategy

    # ---- a run begins ----

    def run_context(self) -> AbstractContextManager[Any]:
        """What the whole run is in.

        On simulated devices nothing is compiled, as no code is generated for them. Where parts are shifted, tensors of
        both devices meet in hooks.
        """
        context = ExitStack()
        if self._is_simulated:
            context.enter_context(uncompiled())
        if self._strategy.options.shifts_activations:
            self._strategy.hooks_mode = BetweenSteps()  # a run within a run has its own
            context.enter_context(self._strategy.hooks_mode)
        return context

    @property
    def _is_simulated(self) -> bool:
        return any(device.type == "sim" for device in self._strategy.parallel_devices or [])

    def clear_earlier_run(self, model: pl.LightningModule) -> None:
        """What an earlier run has left, in the strategy or on the module, goes; another Trainer may take it back."""
        self.give_up_replicas()
        self._strategy.adoption.return_to_trainer_of(model)
        take_over(model, self._strategy)

    def join_processes(self) -> None:
        """The process group, if there are several processes; and ranks that know of steps."""
        environment = self._strategy.cluster_environment
        if environment is not None and self._strategy.num_processes > 1:
            options = self._strategy.options
            connect(environment, options.process_group_backend, self._strategy.root_device, float(options.timeout))
        if isinstance(self._strategy.precision_plugin, DPXPrecision):
            # Lightning made the plugin before the device was known, for CUDA wherever it is
            # not the CPU.
            self._strategy.precision_plugin.place(self._strategy.root_device)
        # From here on hooks of the user run. Where there are several processes this happens again
        # when the replicas of all are counted.
        make_step_aware(self._strategy, self._strategy.process_rank)

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Remembers whose run it is; of several processes the Trainer's handlers of signals are exchanged."""
        self._strategy.adoption.begin_run(trainer)
        if self._strategy.num_processes > 1:
            # A process that stopped by itself would leave the others waiting for it
            # in a collective.
            self._strategy.stopping = CoordinatedStop(trainer)
            take_signals(trainer, self._strategy.stopping)

    def move_module(self) -> None:
        """The user's module goes to the first device as a whole."""
        model = self._strategy.connected_module
        # Before the module is moved: to move it as a whole undoes what was shifted.
        begin_unshifted(model, self._strategy.options.shifts_activations, self._strategy.plans_memory)
        model.to(self._strategy.root_device)

    def begin_session(self) -> None:
        """The replicas are made, after the module reached its device and before the optimizers exist."""
        module = self._strategy.connected_module
        self._strategy.verification.forget()  # what an earlier run found out, of this module or another
        if self._is_simulated and (compiled := compiled_names(module)):
            names = ", ".join(compiled[:3])
            self._strategy.announce(f"dpx: simulated devices run no compiled code; {names} runs as it was written.")
        self._strategy.module_in_use = module  # until the run ends, whatever fails on the way
        self._strategy.session = make_session(self._strategy, module)

    # ---- between its stages ----

    def begin_epoch(self) -> None:
        """Hooks may have written parameters, and several processes must have as many batches as each other.

        Raises:
            ReplicationError: they have not, and some would wait for the others in vain.
        """
        self._strategy.session.mark_changed()
        self._strategy.session.training.begin_epoch()
        module = self._strategy.lightning_module
        if self._strategy.ranks.is_connected and module is not None:
            # A process with fewer batches would leave the others waiting for it in a reduction.
            agree({"the number of batches": module.trainer.num_training_batches})

    def leave_training(self) -> None:
        """What other stages see is what training left: parameters and buffers of rank 0, all cores free."""
        self._strategy.session.mark_changed()
        module = self._strategy.lightning_module
        if self._strategy.ranks.is_connected and module is not None:
            # Gradients are reduced between processes, buffers are not: each has the running
            # statistics of its own rows.
            share("sharing buffers", list(module.buffers()))
        self._strategy.session.release_cores()

    def enter_evaluation(self) -> None:
        """An evaluation begins, perhaps in the middle of training."""
        self.leave_training()
        self._strategy.stopping.begin_evaluation()

    # ---- a run ends ----

    def explain_failure(self, error: BaseException) -> None:
        """Adds what would help against OOM, and which process is lost or was told to stop; after SIGTERM the run fails.

        Lightning up to 2.6 would exit with 0 then.
        """
        if isinstance(error, SIGTERMException) and error.code is None:
            # What a shell reports of a process that SIGTERM has ended, so a scheduler
            # sees no success.
            error.code = 128 + signal.SIGTERM
            if self._strategy.stopping.reason:
                error.add_note(self._strategy.stopping.reason)
        if is_out_of_memory(error) and not isinstance(error, BudgetError):
            error.add_note(self._strategy.planning.advice())
        if not self._strategy.ranks.is_connected:
            return
        # Another process may have ended in the middle of a collective, whose own error
        # names no one.
        if is_loss_of_a_process(error):  # in a collective that is not ours
            error.add_note(describe_loss("the run"))
        elif not isinstance(error, CollectiveError):
            # The others wait for this process in their next collective, and can then say why
            # it is gone.
            declare_failed(error)

    def end_failed_run(self) -> None:
        """Lightning may leave out the teardown, so threads and patches of the process end here."""
        # Not give_up_replicas(): callbacks look at the module in on_exception, and teardown
        # may still come.
        self._strategy.session.end_workers()
        forget_steps(self._strategy)

    def give_up_replicas(self) -> None:
        """Ends the workers and takes everything of a run off the module; does nothing where that has been done."""
        self._strategy.session.close()
        if self._strategy.module_in_use is not None:
            leave(self._strategy.module_in_use, "cpu")  # where all of it goes now; the source of a shift may be full
        self._strategy.module_in_use = None
        # What asks the strategy between two runs gets the answers of a run without replicas.
        self._strategy.session = self._strategy.one_device
        self._strategy.one_device.training.accumulates = False
        self._strategy.stopping = NoStop()
        self._strategy.planning.forget()

    def end_run(self) -> None:
        """A run has ended as it should."""
        self._strategy.session.tell_rest()
        self.give_up_replicas()
        forget_steps(self._strategy)
        stop_roll_call()
