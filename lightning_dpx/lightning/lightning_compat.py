"""Every private name of Lightning and torchmetrics that the package uses, with its reason.

As :mod:`lightning_dpx.torch_compat` for torch: other modules import from here what has no public counterpart, and a
test resolves every entry of :data:`PRIVATE_NAMES` and fails with the name that an upgrade took away. Attributes that
we set on a Trainer or a module for a while (``_trainer``, ``_results``) are set here, too. Public names, and which of
Lightning's two distributions is meant, are in :mod:`lightning_dpx.lightning.lightning_api`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning.lightning_api import PACKAGE, LightningOptimizer, pl
from lightning_dpx.torch_compat import PrivateName

# A type checker reads the first branch alone: both distributions have the same code,
# and other classes.
if TYPE_CHECKING or PACKAGE == "lightning":
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_processes
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_processes
    from lightning.pytorch.loops.fetchers import _DataFetcherWrapper as DataFetcherWrapper
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
    from lightning.pytorch.utilities.data import _extract_batch_size as batch_sizes_in
    from lightning.pytorch.utilities.imports import _RICH_AVAILABLE as RICH_IS_AVAILABLE
else:
    from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_processes
    from lightning_fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning_fabric.utilities.distributed import _sync_ddp_if_available as reduce_processes
    from pytorch_lightning.loops.fetchers import _DataFetcherWrapper as DataFetcherWrapper
    from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
    from pytorch_lightning.strategies.launchers.launcher import _Launcher as Launcher
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
    from pytorch_lightning.utilities.data import _extract_batch_size as batch_sizes_in
    from pytorch_lightning.utilities.imports import _RICH_AVAILABLE as RICH_IS_AVAILABLE

_CHECKED_ON = "lightning 2.6.6"
_CONNECTORS = "lightning.pytorch.trainer.connectors"


def _name(why: str, without: str, checked_on: str = _CHECKED_ON) -> PrivateName:
    return PrivateName(why=why, without=without, checked_on=checked_on)


# A path is that of an import, or an attribute of a specimen: "Trainer()", "LightningModule()", "Strategy()",
# "DDPStrategy()", "ModelParallelStrategy()", "Precision()", "Metric()" or "LightningCLI()".
PRIVATE_NAMES: dict[str, PrivateName] = {
    "lightning.fabric.utilities.distributed._all_gather_ddp_if_available": _name(
        "gathers over processes as Lightning's own strategies do", "LightningModule.all_gather fails on several nodes"
    ),
    "lightning.fabric.utilities.distributed._init_dist_connection": _name(
        "joins the processes as Lightning's own strategies do", "no training on several nodes"
    ),
    "lightning.fabric.utilities.distributed._sync_ddp_if_available": _name(
        "reduces over processes as Lightning's own strategies do", "logged values of several nodes are not reduced"
    ),
    "lightning.pytorch.core.optimizer.LightningOptimizer._to_lightning_optimizer": _name(
        "wraps an optimizer as self.optimizers() returns it", "steps by hand cannot be rehearsed"
    ),
    "lightning.pytorch.loops.fetchers._DataFetcherWrapper": _name(
        "what a training_step(self, dataloader_iter) is given", "such steps would be taken for ones with a batch"
    ),
    "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO": _name(
        "a checkpoint plugin that wraps another", "asynchronous checkpoints would not be written atomically"
    ),
    "lightning.pytorch.strategies.launchers.launcher._Launcher": _name(
        "the base class of launchers", "a fit on several nodes cannot be started in this process"
    ),
    f"{_CONNECTORS}.accelerator_connector._AcceleratorConnector._check_config_and_set_final_flags": _name(
        "its frame tells that a new Trainer asks a strategy what it was given",
        "one strategy object cannot be used in two Trainers",
    ),
    f"{_CONNECTORS}.logger_connector.result._ResultCollection": _name(
        "where a stage keeps what is logged", "a rehearsal would log"
    ),
    f"{_CONNECTORS}.signal_connector._SignalConnector": _name(
        "handles SIGTERM and SIGUSR", "several processes would stop after different steps"
    ),
    "lightning.pytorch.utilities.data._extract_batch_size": _name(
        "counts the rows of a batch as Lightning's logs do", "processes weigh by other rows than their logs"
    ),
    "lightning.pytorch.utilities.imports._RICH_AVAILABLE": _name(
        "whether Lightning prints with rich", "tables look other than Lightning's"
    ),
    "Trainer()._accelerator_connector": _name(
        "what a Trainer gave to its strategy", "one strategy object cannot be used in two Trainers"
    ),
    "Trainer()._accelerator_connector._lazy_init_strategy": _name(
        "gives it again", "one strategy object cannot be used in two Trainers"
    ),
    "Trainer()._signal_connector": _name("handles signals", "several processes would stop after different steps"),
    "Trainer()._data_connector._datahook_selector": _name(
        "whether a batch hook is the module's or the data module's", "slices would be moved without the user's hooks"
    ),
    "Trainer()._logger_connector._callback_metrics": _name(
        "what trainer.callback_metrics answers", "a check of a step that reads what it has logged fails"
    ),
    "Trainer()._logger_connector._logged_metrics": _name(
        "what trainer.logged_metrics answers", "a check of a step that reads what it has logged fails"
    ),
    "Trainer()._logger_connector._progress_bar_metrics": _name(
        "what trainer.progress_bar_metrics answers", "a check of a step that reads what it has logged fails"
    ),
    "Trainer()._active_loop": _name("the loop of the current stage", "a rehearsal would log, or miss data sets"),
    "Trainer().fit_loop._combined_loader": _name(
        "the loaders of a stage", "batches of several loaders cannot be told apart"
    ),
    "Trainer().fit_loop.epoch_loop._batches_that_stepped": _name(
        "the x-axis of Lightning's logs", "our figures would be logged at other steps"
    ),
    "Trainer().fit_loop.epoch_loop._results": _name("where a stage keeps what is logged", "a rehearsal would log"),
    "LightningModule()._current_fx_name": _name(
        why="self.log() asks which hook it is called in, and refuses some; nothing public tells, or sets it",
        without="values that hooks of the transfer log are taken, where one device refuses them",
    ),
    "LightningModule()._trainer": _name(
        "LightningModule drops its trainer from copies", "replicas and shadows have no trainer"
    ),
    "LightningModule()._on_before_batch_transfer": _name(
        "calls the user's hook with the right arguments", "planning from example_batch skips the hook"
    ),
    "LightningModule()._apply_batch_transfer_handler": _name(
        "moves a batch through the user's hooks", "example_input_array is not moved as the user moves it"
    ),
    "LightningModule()._compiler_ctx": _name(
        "what Lightning looks at to refuse compiled modules", "trainer.fit(torch.compile(model)) is refused"
    ),
    "Strategy()._lightning_module": _name(
        "the strategy's module, behind a property that answers for replicas", "steps by hand see the wrong module"
    ),
    "Strategy()._optimizers": _name("the strategy's optimizers", "steps by hand cannot be rehearsed"),
    "Strategy()._lightning_optimizers": _name(
        "the wrappers that self.optimizers() returns", "they would be taken for state of the module"
    ),
    "DDPStrategy()._ddp_kwargs": _name(
        "what DDP does to gradients", "what ranks of DDP take is predicted for defaults"
    ),
    "ModelParallelStrategy()._tensor_parallel_size": _name(
        "whether layers are split, too", "ranks with such layers would be predicted as without"
    ),
    "LightningModule()._device_mesh": _name(
        "what configure_model() shards over", "what ranks of FSDP2 take cannot be predicted"
    ),
    "DDPStrategy()._layer_sync": _name("Trainer(sync_batchnorm=True)", "the option would do nothing"),
    "Precision()._after_closure": _name(
        "hooks between backward and step", "hooks would see gradients of one owner only"
    ),
    "Precision()._clip_gradients": _name("Trainer(gradient_clip_val)", "clipping would see one owner's gradients only"),
    "Trainer().fit_loop.epoch_loop.automatic_optimization._skip_backward": _name(
        "steps without a backward (stochastic weight averaging)", "gradients that are not zeroed would be freed"
    ),
    "Metric()._defaults": _name("the names of a metric's states", "metrics cannot be compared", "torchmetrics 1.9.0"),
    "lightning.pytorch.cli.LightningCLI._get": _name(
        "looks an option up under a subcommand or without one", "dpx plan and dpx fit cannot read the configuration"
    ),
}

# The code that looks at what a strategy was given.
CODE_THAT_ASKS = _AcceleratorConnector._check_config_and_set_final_flags.__code__

# As functions, so that private names of Lightning stand in this file only, where a test resolves
# each of them.
active_loop: Any = attrgetter("_active_loop")
accelerator_connector: Any = attrgetter("_accelerator_connector")
data_hooks: Any = attrgetter("_data_connector._datahook_selector")
steps_for_logs: Any = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
optimizers_of: Any = attrgetter("_optimizers")
lightning_optimizers_of: Any = attrgetter("_lightning_optimizers")
layer_sync_of: Any = attrgetter("_layer_sync")
module_of: Callable[[Any], "pl.LightningModule | None"] = attrgetter("_lightning_module")
states_of: Any = attrgetter("_defaults")
skips_backward: Callable[[Any], bool] = attrgetter("fit_loop.epoch_loop.automatic_optimization._skip_backward")


def metric_dicts(trainer: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The object that holds what a Trainer's three kinds of metrics answer, and these dicts by attribute."""
    connector = trainer._logger_connector
    return connector, {
        "_callback_metrics": connector._callback_metrics,
        "_logged_metrics": connector._logged_metrics,
        "_progress_bar_metrics": connector._progress_bar_metrics,
    }


def forget_batch(trainer: Any) -> None:
    """Lets go of the training batch that what is logged is weighed by; a batch that ends does so itself."""
    results = trainer.fit_loop.epoch_loop._results
    results.batch = None
    results.batch_size = None


def trainer_of(module: Any) -> Any:
    """The Trainer that a module belongs to, or ``None``; the public property raises without one."""
    # Modules that are no LightningModule have none, either.
    return getattr(module, "_trainer", None)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """The mesh that ``configure_model()`` shards over, as ModelParallelStrategy sets it."""
    module._device_mesh = mesh


def ddp_options_of(strategy: Any) -> dict[str, Any]:
    """What Lightning's DDPStrategy hands to torch; nothing of other strategies."""
    options: dict[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    return options


def tensor_parallel_size_of(strategy: Any) -> Any:
    """Of Lightning's ModelParallelStrategy, a number or ``"auto"``; 1 of other strategies."""
    return getattr(strategy, "_tensor_parallel_size", 1)


@contextmanager
def in_hook(module: Any, name: str) -> Iterator[None]:
    """What runs in here is a hook of ``module``, to its ``self.log``."""
    before = module._current_fx_name
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = before


def hook_of(module: Any) -> str | None:
    """The hook of ``module`` that runs, as its ``self.log`` sees it."""
    return getattr(module, "_current_fx_name", None)


def set_trainer(module: Any, trainer: Any) -> None:
    """Makes ``module`` belong to ``trainer``: a LightningModule drops its trainer from its copies."""
    module._trainer = trainer


def compiler_context_of(module: Any) -> Any:
    """What Lightning keeps of a LightningModule that was compiled as a whole; ``None`` of all others."""
    return getattr(module, "_compiler_ctx", None)


def set_compiler_context(module: Any, context: Any) -> None:
    """Makes Lightning take ``module`` for one that was compiled, or with ``None`` for one that was not."""
    module._compiler_ctx = context


def take_signals(trainer: "pl.Trainer", handler: SignalConnector) -> None:
    """Lets ``handler`` answer the signals that the Trainer would."""
    trainer._signal_connector = handler


def initialize_strategy_again(connector: Any) -> None:
    """Gives a strategy what its Trainer has for it."""
    connector._lazy_init_strategy()


def combined_loader(loop: Any) -> Any:
    """The loaders of a loop, or ``None``."""
    return getattr(loop, "_combined_loader", None)


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """What the user's ``on_before_batch_transfer`` makes of ``batch``."""
    return module._on_before_batch_transfer(batch)


def transfer_batch(module: Any, batch: Any, device: Any) -> Any:
    """``batch`` on ``device``, moved through the user's hooks."""
    return module._apply_batch_transfer_handler(batch, device=device)


def wrap_optimizer(optimizer: Any, strategy: Any) -> LightningOptimizer:
    """An optimizer as ``self.optimizers()`` returns it."""
    return LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def precision_hooks(plugin: Any) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """What a precision plugin calls after a closure, for the hook that configures clipping, and to clip."""
    return plugin._after_closure, plugin._clip_gradients, plugin.clip_gradients


def set_precision_hooks(
    plugin: Any, after_closure: Callable[..., None], configure: Callable[..., None], clip: Callable[..., None]
) -> None:
    """Makes a precision plugin call these instead; :func:`reset_precision_hooks` gives it its own back."""
    # On the instance, in front of the class's own: to delete them is to have those back.
    plugin._after_closure = after_closure
    plugin._clip_gradients = configure
    plugin.clip_gradients = clip


def reset_precision_hooks(plugin: Any) -> None:
    """The plugin calls its own again."""
    del plugin._after_closure
    del plugin._clip_gradients
    del plugin.clip_gradients


def look_up(cli: Any, config: Any, name: str) -> Any:
    """An option of a LightningCLI, of whichever subcommand runs."""
    return cli._get(config, name)


__all__ = [
    "CODE_THAT_ASKS", "DataFetcherWrapper", "Launcher", "PRIVATE_NAMES", "RICH_IS_AVAILABLE",
    "ResultCollection", "SignalConnector", "WrappingCheckpointIO", "accelerator_connector", "active_loop",
    "all_gather_processes", "batch_sizes_in", "before_batch_transfer", "combined_loader", "compiler_context_of",
    "data_hooks", "ddp_options_of", "forget_batch", "hook_of", "in_hook", "set_compiler_context", "set_device_mesh",
    "set_trainer", "init_dist_connection", "initialize_strategy_again", "layer_sync_of", "lightning_optimizers_of",
    "look_up", "metric_dicts", "module_of", "optimizers_of", "precision_hooks", "reduce_processes",
    "reset_precision_hooks", "set_precision_hooks", "states_of", "steps_for_logs", "take_signals",
    "tensor_parallel_size_of", "trainer_of", "transfer_batch", "wrap_optimizer",
]  # fmt: skip
