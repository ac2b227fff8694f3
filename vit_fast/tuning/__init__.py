"""The fastest right way to run a model on this machine: what can be chosen, the search for it, and kept answers.

`optimization.py` holds `vit_fast.optimize`; `search.py` the search, which knows nothing of models; `choices.py` what
there is to choose; `build.py` makes a choice run, and `drop_in.py` puts it in the model's place; `trials.py` holds
choices against the model as it was given and times them; `answers.py` keeps what was found.
"""
