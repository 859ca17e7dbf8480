"""Nothing of the libraries' own words between our tables."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Those of both packages under which Lightning is installed.
_TALKERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without what Lightning says of each Trainer, such as devices, seeds and tips; its warnings come through."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        # Loggers below these take over the level, as they have none of their own.
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
