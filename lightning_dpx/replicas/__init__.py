"""K persistent replicas of one module, the slices that they get and the workers that run them."""

from lightning_dpx.python_objects.preserve import GeneratorStates, preserve_rng_state
from lightning_dpx.replicas import collectives
from lightning_dpx.replicas.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_dpx.replicas.batch_slice import BatchSlice, weights_of
from lightning_dpx.replicas.buffer_sync import BufferMode
from lightning_dpx.replicas.caller_context import CallerContext
from lightning_dpx.replicas.containers import map_leaves, map_result, map_tensors
from lightning_dpx.replicas.context import InterProcess, ReplicaRank, current_rank
from lightning_dpx.replicas.draws import (
    BatchDraws,
    SeenGenerators,
    Source,
    StepDraws,
    ThreadDraws,
    drawn_on_devices,
    drawn_once,
    draws_both_ways,
)
from lightning_dpx.replicas.early_backward import EarlyBackward, ExpectedGradient, loss_of
from lightning_dpx.replicas.executor_choice import Execution
from lightning_dpx.replicas.failed_steps import end_failed_step
from lightning_dpx.replicas.joint_backward import Roots
from lightning_dpx.replicas.merging.appended_items import (
    ListPlace,
    ListWatch,
    find_lists,
    held_by_classes,
    without_graphs,
)
from lightning_dpx.replicas.merging.attribute_rules import AttributeRules
from lightning_dpx.replicas.merging.by_type import gather
from lightning_dpx.replicas.merging.merge_rules import MergeRules
from lightning_dpx.replicas.merging.news import News
from lightning_dpx.replicas.merging.rebound_numbers import NumberWatch, changed_numbers, numbers_of
from lightning_dpx.replicas.merging.reductions import weighted_mean
from lightning_dpx.replicas.merging.rules import Weights
from lightning_dpx.replicas.micro_batch_sizes import MicroBatches, check_micro_batches, parse_micro_batches
from lightning_dpx.replicas.output_dims import OutputDims
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replica_set import ReplicaSet
from lightning_dpx.replicas.replicate import make_shadow_module
from lightning_dpx.replicas.slice_gradients import InputGradients, OutputGradients, join_input_gradients
from lightning_dpx.replicas.slicers import Slicer, make_slicer, register_slicer, slicer_of
from lightning_dpx.replicas.slicing import (
    BatchDim,
    BatchSlicer,
    UncuttableBatch,
    batch_size,
    check_batch_dim,
    check_paths,
    check_workload,
    children_of,
    parse_workload,
    rebuild,
    slice_batch,
    split_sizes,
)
from lightning_dpx.replicas.thread_probe import Trial, first_loss
from lightning_dpx.replicas.timing import StepTimes
from lightning_dpx.replicas.two_passes import TwoPasses

__all__ = [
    "AttributeRules",
    "BatchDim",
    "BatchDraws",
    "SeenGenerators",
    "Source",
    "StepDraws",
    "ThreadDraws",
    "drawn_on_devices",
    "drawn_once",
    "draws_both_ways",
    "BatchSlicer",
    "InputGradients",
    "InterProcess",
    "BufferMode",
    "CallerContext",
    "EarlyBackward",
    "Execution",
    "ExpectedGradient",
    "GeneratorStates",
    "ListPlace",
    "ListWatch",
    "MergeRules",
    "MicroBatches",
    "News",
    "NumberWatch",
    "OutputDims",
    "OutputGradients",
    "Replica",
    "ReplicaRank",
    "ReplicaSet",
    "Roots",
    "BatchSlice",
    "Slicer",
    "StepTimes",
    "Trial",
    "TwoPasses",
    "UncuttableBatch",
    "Weights",
    "batch_size",
    "check_batch_dim",
    "check_workload",
    "check_micro_batches",
    "join_input_gradients",
    "check_paths",
    "changed_numbers",
    "children_of",
    "collectives",
    "current_rank",
    "end_failed_step",
    "find_lists",
    "first_loss",
    "gather",
    "held_by_classes",
    "loss_of",
    "make_slicer",
    "map_leaves",
    "map_result",
    "map_tensors",
    "numbers_of",
    "parse_micro_batches",
    "parse_workload",
    "preserve_rng_state",
    "rebuild",
    "restore_batch_norm",
    "register_slicer",
    "slice_batch",
    "slicer_of",
    "split_sizes",
    "make_shadow_module",
    "synchronize_batch_norm",
    "weighted_mean",
    "weights_of",
    "without_graphs",
]
