"""The search against simulated machines: known best, noise, drift, bursts, failures, hangs, memory that runs out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from bench_support import NoisyClock

from vit_fast.measure.search import SCOUTING_CALLS, Found, OutOfTime, Refused, Trial, _Search, search


@dataclass(frozen=True)
class Simulated:
    """A candidate; its preparation takes `slower` times the estimated `seconds`."""

    name: str
    ms: float  # of a call on a quiet machine
    changes: int = 1
    seconds: float = 1.0
    trouble: str | None = None  # "incorrect", "hangs", "memory" (in the fifth call), "uneven" (some calls take longer)
    leads_to: tuple[Simulated, ...] = ()  # its variations
    slower: float = 1.0


class Machine(NoisyClock):
    """A bench with a simulated clock."""

    interrupt_at_s = math.inf

    def __init__(self, seed: int = 0, **how: float) -> None:
        super().__init__(seed, **how)
        self.calls: Counter[str] = Counter()
        self.held: set[str] = set()

    def elapsed_s(self) -> float:
        return self.now_s

    def seconds(self, candidate: Simulated) -> float:
        return candidate.seconds

    def prepare(self, candidate: Simulated, seconds: float) -> None:
        takes = math.inf if candidate.trouble == "hangs" else candidate.seconds * candidate.slower
        self.now_s += min(takes, seconds) if candidate.changes else takes
        if takes > seconds and candidate.changes:
            raise OutOfTime(f"more than {seconds:g} s")
        if candidate.trouble == "incorrect":
            raise Refused("off by 1")
        self.held.add(candidate.name)

    def call_ms(self, candidate: Simulated, number: int) -> float:
        assert candidate.name in self.held
        self.calls[candidate.name] += 1
        if candidate.trouble == "memory" and self.calls[candidate.name] == 5:
            raise Refused("out of memory")
        if self.now_s > self.interrupt_at_s:
            raise KeyboardInterrupt
        return 1e3 * self.spend(candidate.ms / 1e3 * (4 if candidate.trouble == "uneven" and number % 5 == 0 else 1))

    def tell(self, what: str) -> None:
        assert f"{len(self.held)} candidates" in what

    def release(self, candidate: Simulated) -> None:
        self.held.remove(candidate.name)

    def variations(self, candidate: Simulated) -> Sequence[Simulated]:
        return candidate.leads_to


ORIGINAL = Simulated("original", 100.0, changes=0)


def reasons(found: Found) -> dict[str, str]:
    return {trial.candidate.name: str(trial.reason) for trial in found.trials}


def random_field(seed: int) -> list[Simulated]:
    """Candidates, some of which would be fastest but fail; those that hang come last, like those that take long."""
    generator = random.Random(seed)
    draw, changes = generator.uniform, generator.randrange
    count = generator.randrange(4, 9)
    field = [Simulated(f"c{i}", draw(40, 160), changes(1, 6), draw(0.2, 6), slower=draw(0.5, 2)) for i in range(count)]
    troubles = zip(generator.sample(range(count), 3), ("incorrect", "memory", generator.choice(["hangs", None])))
    for place, trouble in troubles:
        field[place] = replace(field[place], ms=field[place].ms / 2, trouble=trouble)
    return sorted(field, key=lambda candidate: candidate.trouble == "hangs")


def test_finds_the_best_on_noisy_machines() -> None:
    """Within 3 % of the best that works, inside the budget, on 95 % of the machines."""
    good = 0
    for seed in range(20):
        machine, field = Machine(seed, noise=0.05, drift=0.1, bursts=0.01), random_field(seed)
        found = search(machine, ORIGINAL, field, budget_s=120)
        working = [ORIGINAL, *(candidate for candidate in field if candidate.trouble is None)]
        good += found.chosen.ms <= 1.03 * min(candidate.ms for candidate in working)
        assert machine.now_s <= 121
    assert good >= 19


def test_neither_something_slower_nor_something_less_simple_is_chosen() -> None:
    slower = [Simulated(f"c{i}", 100 + 2 * i) for i in range(5)]
    equal = [Simulated("elaborate", 50.0, changes=5), Simulated("plain", 50.2, changes=1)]
    for seed in range(20):
        machine = Machine(seed, noise=0.2, drift=0.2, bursts=0.05)
        assert search(machine, ORIGINAL, slower, budget_s=60).chosen == ORIGINAL
        found = search(Machine(seed, noise=0.02), ORIGINAL, equal, budget_s=60)
        assert found.chosen.name == "plain" and "less simple" in reasons(found)["elaborate"]


def test_a_simpler_candidate_that_does_not_beat_the_original_is_not_called_less_simple() -> None:
    run = _Search(Machine(), ORIGINAL, 60, 0.5)
    fast, simple = (
        Trial(Simulated("fast", 80.0, changes=5), [80.0] * 8),
        Trial(Simulated("simple", 92.0), [80.0, 100.0] * 4),
    )
    run.original.samples_ms, run.again, run.leader = [100.0] * 8, [80.0, 92.0] * 4, fast
    run.running, run.trials = [run.original, fast, simple], [run.original, fast, simple]
    assert run.conclude(False).chosen.name == "fast"
    assert (run.original.reason, simple.reason) == ("1.25x slower", "not measurably faster")


def test_variations_of_the_best_are_tried_and_slow_candidates_released_early() -> None:
    leads = (Simulated("two threads", 40.0, changes=3), Simulated("channels last", 55.0, changes=3))
    field = [Simulated("slow", 90.0, leads_to=(Simulated("never", 1.0),)), Simulated("fast", 60.0, leads_to=leads)]
    machine = Machine()
    found = search(machine, ORIGINAL, field, budget_s=120)
    assert found.chosen.name == "two threads" and "never" not in reasons(found)
    assert machine.calls["slow"] == SCOUTING_CALLS and "x slower than the fastest" in reasons(found)["slow"]
    assert "slow" not in machine.held


def test_the_budget_is_kept_and_the_result_says_what_was_not_reached() -> None:
    machine = Machine()
    hanging, long = Simulated("hangs", 1.0, trouble="hangs"), Simulated("slow to build", 10.0, seconds=50)
    found = search(machine, ORIGINAL, [Simulated("quick", 80.0), long, hanging], budget_s=20)
    assert "50 s" in reasons(found)["slow to build"] and "more than" in reasons(found)["hangs"]
    assert machine.now_s <= 20 and found.chosen.name == "quick" and found.tried == 2
    assert found.finish_s is not None and found.finish_s > 50


def test_the_estimated_budget_finishes_the_search() -> None:
    cut = 0
    for seed in range(20):
        draw = random.Random(seed).uniform
        leads = (Simulated("varied", 30.0, seconds=draw(1, 10)),)
        field = [Simulated(f"c{i}", draw(50, 150), seconds=draw(1, 20), leads_to=leads) for i in range(4)]
        budget = draw(5, 60)
        found = search(Machine(seed, noise=0.02), ORIGINAL, field, budget_s=budget)
        if found.finish_s is None:
            assert found.tried == len(found.trials)
            continue
        cut += 1
        assert found.finish_s > budget
        again = search(Machine(seed, noise=0.02), ORIGINAL, field, budget_s=1.2 * found.finish_s)
        assert again.tried > found.tried or again.finish_s is None
    assert cut > 8


@pytest.mark.parametrize(("at_s", "best"), [(1.4, "original"), (4.0, "fast")])
def test_ctrl_c_returns_the_best_so_far(at_s: float, best: str) -> None:
    machine = Machine()
    machine.interrupt_at_s = at_s
    field = [Simulated("fast", 50.0), *(Simulated(f"c{i}", 80.0) for i in range(3))]
    found = search(machine, ORIGINAL, field, budget_s=120)
    assert found.interrupted and found.chosen.name == best
    assert [trial.candidate for trial in found.trials if trial.reason is None] == [found.chosen]


def test_the_objective_latency_compares_slow_calls() -> None:
    field = [Simulated("uneven", 80.0, trouble="uneven"), Simulated("even", 90.0)]
    assert search(Machine(), ORIGINAL, field, budget_s=120).chosen.name == "uneven"
    assert search(Machine(), ORIGINAL, field, budget_s=120, objective="latency").chosen.name == "even"
