"""Candidates (ways to run a model): building, checking and timing them, and the search for the fastest."""
