"""Candidates, their check and clock, and the search for the fastest one."""
