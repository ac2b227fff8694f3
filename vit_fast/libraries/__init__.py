"""Support for each library, in files that can be imported without it; known.py lists them.

A library's file holds what applies to it:

- NAME; SIGNATURE, a pattern that finds its weights, and `convert`, which translates their names to ours (timm's);
- ACTIVATION_CLASSES and NORM_CLASSES, its classes that compute what one of ours does;
- `wrote` and `read_config`, for the configuration files of its repositories (transformers': transformers_config.py);
- PEER, what its own class of our architecture is, and `build_peer`, which makes it;
- `recognise`, what a model at hand takes and gives, for export;
- FORMS, the fused class of each of its classes, and LEFT, why others are never fused (timm_blocks.py,
  transformers_blocks.py and transformers_packed.py).
"""
