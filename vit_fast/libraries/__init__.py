"""Support for each library, in files that can be imported without it; known.py lists them.

The file of a library contains what is specific to it:

- NAME; SIGNATURE, a pattern that recognizes its weights; and `convert`, which translates their names to timm's;
- ACTIVATION_CLASSES and NORM_CLASSES, its classes that compute one of our activations or norms;
- `wrote` and `read_config`, for the configuration files of its repositories (transformers': transformers_config.py);
- PEER, the name of its model with our architecture, and `build_peer`, which builds it;
- `recognise`, which describes a model for export: its inputs and outputs;
- FORMS, the fused class of each of its classes, and SKIPPED, reasons why other classes are never fused (timm_blocks.py,
  transformers_blocks.py and transformers_packed.py).
"""
