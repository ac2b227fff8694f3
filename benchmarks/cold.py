"""What a subject needs from nothing: a process of its own from its start to the first answer, which is then checked.

`vit-fast bench --cold`. Counted are the imports, making and placing the model, compiling, exporting where the subject
is a file, and the answer to one batch; Triton's and torch's caches on the disk are as they are found.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from .machine import products_in
from .rows import Group, Row

LIMIT_S = 900.0


def cold_start(request: Mapping[str, Any], group: Group, label: str) -> Row:
    """One subject of a group in a fresh process.

    Args:
        request: The plan's, as plain data.
        group: What it computes.
        label: The subject.
    Returns:
        cold_s, seconds, and cold_MiB, the process's peak memory on the host, where the answer was right; else
        cold_failed, why not.
    """
    asked = dict(request) | {"models": [group.model.source or group.model.name], "batch_sizes": [group.batch_size]}
    asked |= {"img_size": None if group.model.data is None else group.model.image_hw, "latency": False}
    asked |= {"dtypes": None if group.dtype_name == "amp" else [group.dtype_name], "subjects": [label]}
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()", json.dumps(asked)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"cold_failed": f"more than {LIMIT_S:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"cold_failed": last[:500]}
    found = json.loads(done.stdout.splitlines()[-1])
    if "answered" not in found:
        return {"cold_failed": f"{found['status']}: {found['reason']}"}
    return {"cold_s": round(found["answered"] - started, 2), "cold_MiB": found["peak_MiB"]}


def answer() -> None:
    """In the fresh process: the first answer, when it was given, and whether it was right, as JSON."""
    from .plan import make_plan
    from .preparation import first_answer

    plan = make_plan(**json.loads(sys.argv[1]))
    (group,) = plan.groups()
    ((selection,),) = plan.selections.values()
    with products_in(group.dtype_name):
        found = first_answer(selection, group, plan.images, plan.device)
    found["peak_MiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    print(json.dumps(found))
