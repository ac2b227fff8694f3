"""`fuse` and `freeze`: blocks of other libraries read as data (`BlockParts`) and run by the fused kernels."""
