"""Commands, one file each with `register(app)`."""
