"""Support for each library, in files that do not import the library; known.py lists them.

The files of a library define what it has of the following:

- NAME; SIGNATURE, a pattern that recognizes the names of its weights; `convert`, which translates them to timm's
- CONFIG_KEYS and `read_config`, for config.json in its repositories
- PEER, the name of its model with our architecture, and `build_peer`, which builds it
- `recognize`, which describes a model for export
- `packed_tower`, which packs the calls of a vision tower for CUDA graphs
- FORMS, which creates fused classes from its classes and our mixins, and SKIPPED, reasons against fusing other classes
"""
