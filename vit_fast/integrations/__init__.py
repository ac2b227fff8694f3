"""What other libraries' own hooks are handed: one file a library, which needs that library."""
