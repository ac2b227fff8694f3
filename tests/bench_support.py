"""A small run of the bench: its plan, a listener, and what its rows hold."""

from __future__ import annotations

from vit_fast.benchmarks.plan import Plan, make_plan
from vit_fast.benchmarks.rows import SPEED_FIELDS
from vit_fast.measure.clock import Protocol

QUICK = Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1)


class Notes:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.total, self.steps, self.said, self.doing = 0, 0.0, [], []

    def start(self, steps: int) -> None:
        self.total = steps

    def now(self, what: str) -> None:
        self.doing.append(what)

    def done(self, steps: float) -> None:
        self.steps += steps

    def say(self, text: str) -> None:
        self.said.append(text)


def plan(*labels: str, batch_sizes: tuple[int, ...] = (2,), **fields: object) -> Plan:
    return make_plan(
        models=["vit_test"],
        batch_sizes=batch_sizes,
        dtypes=["fp32"],
        subjects=labels,
        device="cpu",
        protocol=QUICK,
        **fields,
    )


def rows_by_subject(record: dict) -> dict[str, dict]:
    return {row["subject"]: row for row in record["rows"]}


def assert_no_speed(row: dict) -> None:
    assert all(row[field] is None for field in SPEED_FIELDS), row
