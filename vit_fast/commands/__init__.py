"""Commands: one module each, with a function that has the name of the command."""
