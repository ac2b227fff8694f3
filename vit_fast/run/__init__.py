"""torch.compile, CUDA graphs, and warm-up."""
