"""Functions of the command line, named like their commands. `vit_fast/cli.py` maps each command to its module."""
