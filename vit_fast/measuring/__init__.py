"""How durations are taken, and what they can tell apart: the one ruler of `vit-fast bench` and `vit_fast.optimize`.

`timing.py` times several calls in turns, on a GPU by `device_clock.py`; `resolution.py` says what a ratio of theirs is
worth; `limits.py` ends what hangs, and tells memory that ran out from other failures.
"""
