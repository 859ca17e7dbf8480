"""``python -m lightning_dpx`` is ``dpx``."""

import sys

from lightning_dpx.cli import main

sys.exit(main())
