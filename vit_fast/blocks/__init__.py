"""Encoder blocks of any library as data (`BlockParts`), and functions that run blocks with fused operators."""
