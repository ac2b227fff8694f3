"""The parts of a library's file: renamed weights, peers, image models for export, packed towers for CUDA graphs."""
