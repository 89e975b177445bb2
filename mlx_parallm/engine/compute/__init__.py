"""What the engine does on the device: passes, sampling, how rows are batched, what is changed in a model."""
