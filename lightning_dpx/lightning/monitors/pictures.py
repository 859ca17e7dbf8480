"""Pictures for the loggers that take them, by their own public methods: their libraries are not imported here.

    logger.experiment.add_figure(tag, figure, step)             TensorBoardLogger, and SummaryWriters of other loggers
    logger.log_image(key=, images=, step=)                      WandbLogger
    logger.experiment.log_figure(run_id=, figure=, ...)         MLFlowLogger: a file among the run's artifacts

A logger of any class that has one of these gets its pictures, too.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from lightning_dpx.lightning.lightning_api import Logger
from lightning_dpx.pictures import pixels_of


def takes_pictures(logger: Logger) -> bool:
    """Whether the logger has one of the methods for pictures."""
    return _has_add_figure(logger) or _has_log_image(logger) or _has_log_figure(logger)


def log_picture(logger: Logger, parts: Sequence[str], figure: Any, step: int) -> None:
    """Gives a matplotlib figure to a logger, as ``dpx/...``; one that takes no pictures is left alone.

    Args:
        logger: Of any class.
        parts: What the picture is called behind ``dpx``, by group.
        figure: The picture.
        step: What it shows, as the logger's other figures count it.
    """
    path = ("dpx", *parts)
    named = logger.group_separator.join(path)
    if _has_add_figure(logger):
        _experiment(logger).add_figure(named, figure, step)
    elif _has_log_image(logger):
        # Of what log_image takes, an array needs no file that must outlive the call.
        logger.log_image(key=named, images=[pixels_of(figure)], step=step)  # type: ignore[attr-defined]
    elif _has_log_figure(logger):
        # A path, whatever the separator, so that the artifacts of a run lie in a folder of ours.
        file = "/".join(path) + ".png"
        _experiment(logger).log_figure(run_id=logger.run_id, figure=figure, artifact_file=file)  # type: ignore[attr-defined]


def _experiment(logger: Logger) -> Any:
    return getattr(logger, "experiment", None)


def _has_add_figure(logger: Logger) -> bool:
    return _takes(_experiment(logger), "add_figure", "tag", "figure", "step")


def _has_log_image(logger: Logger) -> bool:
    return _takes(logger, "log_image", key="", images=[], step=0)


def _has_log_figure(logger: Logger) -> bool:
    named = hasattr(type(logger), "run_id")
    return named and _takes(_experiment(logger), "log_figure", run_id="", figure=None, artifact_file="")


def _takes(owner: Any, name: str, *args: Any, **kwargs: Any) -> bool:
    """Whether the class of ``owner`` has a method of that name that can be called so."""
    # Asked of the class: Lightning's dummy loggers and experiments answer to any name.
    if not callable(getattr(type(owner), name, None)):
        return False
    try:
        # A method of the same name may want something else, and would end a fit that went well.
        inspect.signature(getattr(owner, name)).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
