"""The command line in this process."""

from __future__ import annotations

from vit_fast.cli import main


def run(*arguments: str) -> int:
    """A command's exit status."""
    try:
        main([*arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
