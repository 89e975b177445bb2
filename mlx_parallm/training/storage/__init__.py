"""Training on disk: checkpoints, journals, completions that may still be rewarded."""
