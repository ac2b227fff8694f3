"""8-bit number formats: observers, scales, and FP8 blocks."""
