"""Stands in for the work of gpu-check's jobs, in the process that runs them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vit_fast.benchmarks.gpu_check import Job
from vit_fast.benchmarks.records import JOURNAL_NAME, PARTIAL


def pretend(job: Job, folder: Path) -> dict[str, Any]:
    if job.name == "raises":
        raise ValueError("no such kernel")
    if job.name == "hangs":
        partial = folder.with_name(folder.name + PARTIAL)
        partial.mkdir()
        (partial / JOURNAL_NAME).write_text('{"kind": "row", "value": {}}\n' * 3)
        time.sleep(900)
    if job.name == "dies":
        os._exit(3)
    print("printed by a job", flush=True)
    return {"outcome": "measured", "pid": os.getpid()}
