"""An encoder block as data (`BlockParts`), whatever library it comes from, and its run by the fused operators."""
