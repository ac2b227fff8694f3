"""Extension points of other libraries: one file per library, which imports it."""
