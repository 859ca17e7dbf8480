"""A module whose parts, hooks or metrics are others than in the last step: its replicas are made anew.

What is known of the old ones stays where it is of the module: gradients that hooks have written, rules of metrics, and
the states of optimizers, which go home to the module's own parameters until there are new owners.
"""

from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import ReplicationError, some_of
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.lightning_compat import set_trainer
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.owners import memory_of_dropped, move_optimizers
from lightning_dpx.replicas import ReplicaSet

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


def follow_structure(session: "Session", name: str) -> bool:
    """What was pruned, parametrized, added or exchanged on the module since the last step: replicas anew.

    Args:
        name: Of the step that comes.

    Returns:
        Whether there are replicas; if the module cannot be copied any more, the run goes on with one device.
    """
    replicas = session.replicas
    if session.shifts:
        _give_whole_for_hooks(session)
        return True
    if not replicas.structure.has_changed:
        return _follow_metrics(session, name)
    session.strategy.announce("dpx: the module has other parts than before; its replicas are made anew.")
    # Evaluation, too: what its step did with the old parts says nothing of the new ones.
    session.verification.reopen_all()
    return remake_replicas(session)


def _follow_metrics(session: "Session", name: str) -> bool:
    """Metrics that a hook or a step has made since the replicas were made: replicas anew, which share them."""
    if len(session.replicas.replicas) == 1 or session.whole_batches.reason_for(name) is not None:
        return True
    new = session.metric_watch.new_ones(session.metrics, session.replicas.root.modules)
    if not new:
        return True
    if session.metric_watch.come_every_time:
        session.whole_batches.give_whole(
            name,
            f"The module has other metrics in every batch ({some_of(new)}), of which replicas have copies.",
            "For all devices to take part, make metrics before the run, and reset() them.",
        )
        return True
    session.strategy.announce("dpx: the module has other metrics than before; its replicas are made anew.")
    session.verification.reopen_all()
    return remake_replicas(session)


def remake_replicas(session: "Session") -> bool:
    """Copies the user's module again, as it is now.

    Returns:
        Whether there are replicas; if the module cannot be copied any more, the run goes on with one device.
    """
    replicas = session.replicas
    step = session.step
    optimizers = session.strategy.optimizers
    homes = dict(zip(step.owner_parameters, replicas.root.parameters, strict=True))
    session.strategy.planning.remove(replicas)
    metrics = ReplicaMetrics(replicas.root.module, number=session.options.number_rule)
    # Rules are kept by metric object. The module may have other metrics now, so what was
    # learned goes by way of their paths.
    metrics.take_rules(session.metrics.rules_by_path())
    replicas.share(metrics.named.values())
    # What hooks wrote into copies of gradients goes to the owners that there are now.
    session.gradient_hooks.before_backward()
    manual = session.training.manual
    if manual is not None:
        manual.gradients.take_from_hooks()
    step.sums.memory_of_first = memory_of_dropped(optimizers, homes, replicas.root.module.parameters())
    try:
        with torch.inference_mode(False):  # also in an evaluation: they are written to after it
            step.remake_replicas()
    except ReplicationError as error:
        device = session.strategy.root_device
        rank_zero_warn(f"dpx: everything runs on {device} from here on, the other devices idle: {error}")
        move_optimizers(optimizers, homes)
        # The closure of the optimizer that runs this step still follows the owners.
        replicas.state.parameters.set_owners(())
        replicas.close()
        session.strategy.session = session.strategy.one_device
        return False
    # First home to the parameters of the user's module, which alone have outlasted
    # the old owners.
    move_optimizers(optimizers, homes)
    give_trainer(replicas, session.trainer)
    session.verification.reopen("training_step")
    session.metrics = metrics
    metrics.dim = replicas.output_dim
    session.strategy.planning.follow_given(replicas)
    if step.has_other_owners:
        mine = replicas.root.parameters
        move_optimizers(optimizers, dict(zip(mine, step.owner_parameters, strict=True)))
    session.gradient_hooks.follow_replicas()
    if manual is not None:
        manual.follow_replicas()
    return True


def _give_whole_for_hooks(session: "Session") -> None:
    """Replicas with shifted parts are not made anew, so what a new hook does to gradients the first one does."""
    name = session.replicas.structure.name_with_other_hooks
    if name is not None:
        session.replicas.python_state.hooks.accept_those_of_parameters()
        reason = f"Parameter {name} got or lost a hook, which replicas with shifted parts cannot follow."
        session.whole_batches.give_whole("training_step", reason, "Register hooks before fit.")


def give_trainer(replicas: ReplicaSet, trainer: Any) -> None:
    """Replicas have the trainer of the user's module, which LightningModule drops from its copies."""
    for replica in replicas.replicas[1:]:
        set_trainer(replica.module, trainer)
