"""`fuse`, `freeze` and `calibrate`."""
