"""Support for Hugging Face transformers, 4.53 and newer.

To fuse a new model family, add a row to families.py. If a class of the family computes something new, add its fused
class to self_attention.py, encoder_layer.py or packed_layers.py. To load the family's weights, add its weight names to
hf_model.py and the defaults of its config.json to hf_config.py.
"""
