"""Training, in parts: the data (archives, datasets), how (config), a step (trainer), what is kept (runs), figures."""
