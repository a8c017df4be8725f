"""Pre-training, fine-tuning and a figure, see `__main__`."""
