"""What the package uses of PyTorch Lightning, from whichever of its two distributions the program has loaded.

Lightning is published twice: as ``lightning`` (``import lightning.pytorch as pl``) and as ``pytorch_lightning``. The
code is the same, the classes are not: a Trainer of one refuses the modules, callbacks and strategies of the other. So
one of both is chosen here, once, when the package is imported, and every other file takes Lightning's public names
from this one (private ones are in :mod:`lightning_dpx.lightning.lightning_compat`):

1. the one that the environment variable ``LIGHTNING_DPX_PACKAGE`` names;
2. the one that is loaded already; ``lightning`` where both are;
3. the one that is installed; ``lightning`` where both are.
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_dpx.errors import ConfigurationError, UnsupportedError

VARIABLE = "LIGHTNING_DPX_PACKAGE"
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # as installed, as imported


def choose_package() -> str:
    """``"lightning"`` or ``"pytorch_lightning"``.

    Raises:
        ConfigurationError: the environment variable names something else.
        UnsupportedError: neither is installed.
    """
    named = os.environ.get(VARIABLE, "")
    if named:
        if named not in PACKAGES:
            raise ConfigurationError(f"{VARIABLE}={named!r} is not allowed; choose one of {', '.join(PACKAGES)}.")
        return named
    for package, module in PACKAGES.items():
        # What the program has loaded is what its Trainer is of.
        if module in sys.modules:
            return package
    for package in PACKAGES:
        # Asked without importing, so that the other distribution is not loaded beside
        # the chosen one.
        if find_spec(package) is not None:
            return package
    raise UnsupportedError("lightning_dpx needs PyTorch Lightning: pip install lightning")


PACKAGE = choose_package()
MODULE = PACKAGES[PACKAGE]

# A type checker reads the first branch alone: the names are the same in both.
if TYPE_CHECKING or PACKAGE == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Checkpoint,
        GradientAccumulationScheduler,
        ModelSummary,
        ProgressBar,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import Logger, TensorBoardLogger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.plugins import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
        TransformerEnginePrecision,
    )
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.strategies import (
        DeepSpeedStrategy,
        FSDPStrategy,
        ParallelStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.warnings import PossibleUserWarning
    from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        Checkpoint,
        GradientAccumulationScheduler,
        ModelSummary,
        ProgressBar,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.loggers import Logger, TensorBoardLogger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.loops.optimization.automatic import ClosureResult
    from pytorch_lightning.plugins import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
        TransformerEnginePrecision,
    )
    from pytorch_lightning.profilers import PyTorchProfiler
    from pytorch_lightning.strategies import (
        DeepSpeedStrategy,
        FSDPStrategy,
        ParallelStrategy,
        Strategy,
        StrategyRegistry,
    )
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "Accelerator",
    "AcceleratorRegistry",
    "BaseFinetuning",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClosureResult",
    "ClusterEnvironment",
    "DeepSpeedStrategy",
    "DoublePrecision",
    "DummyLogger",
    "FABRIC_STRATEGIES",
    "FSDPStrategy",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LightningEnvironment",
    "LightningModule",
    "LightningOptimizer",
    "Logger",
    "MODULE",
    "MisconfigurationException",
    "MixedPrecision",
    "PACKAGE",
    "ModelSummary",
    "ParallelStrategy",
    "PossibleUserWarning",
    "Precision",
    "ProgressBar",
    "PyTorchProfiler",
    "SIGTERMException",
    "SLURMEnvironment",
    "Strategy",
    "StrategyRegistry",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "TrainerStatus",
    "TransformerEnginePrecision",
    "is_overridden",
    "is_param_in_hook_signature",
    "pl",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
]
