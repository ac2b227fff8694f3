"""Support for timm, 1.0.20 and newer."""
