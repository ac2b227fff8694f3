"""Number formats of eight bits: observers, scales, and FP8 blocks."""
