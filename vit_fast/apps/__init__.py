"""Applications of a model: data, training, prediction and evaluation."""
