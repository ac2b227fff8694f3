"""Runs the command line in this process, and hides installed packages."""

from __future__ import annotations

import importlib.util

import pytest

from vit_fast.cli import main


def run(*arguments: str) -> int:
    """Returns a command's exit status."""
    try:
        main([*arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes find_spec report that a package is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
