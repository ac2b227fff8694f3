"""An encoder block of any library as data (`BlockParts`), and functions that run it with fused operators."""
