"""Support for Hugging Face transformers, 4.53 and newer."""
