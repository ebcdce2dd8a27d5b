"""What runs on the simulated device is collected there only; `test_simulation.py` starts it."""

from __future__ import annotations

import os

from tests.npu.simulated import INSIDE

collect_ignore_glob = [] if INSIDE in os.environ else ["test_simulated_*.py"]
