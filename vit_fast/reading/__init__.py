"""Reads what a module computes: `read` returns the parts of attention and MLP, proved by comparison, or reasons."""
