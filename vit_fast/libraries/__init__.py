"""Support for each library, in files that import the library only when a function needs it. known.py lists the files.

The files of a library define some of these names:

- NAME; SIGNATURE, a pattern that recognizes the names of its weights; `convert`, which renames them to timm's names
- CONFIG_KEYS and `read_config`, for config.json in its repositories
- `build_peer`, which builds its model with our architecture
- `recognize`, which describes a model for export
- `packed_tower`, which packs the calls of a vision tower for CUDA graphs
- MIXINS, which contains our mixins for its classes, by the path of the class
"""
