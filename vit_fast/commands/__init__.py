"""Thin typer commands, one file a command; each exposes register(app)."""
