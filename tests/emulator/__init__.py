"""PTX emulator: runs compiled kernels on the CPU, and reports races and invalid accesses. See README.md."""
