"""A PTX emulator: executes on the CPU what Triton compiles, and reports races and stray accesses. See README.md."""
