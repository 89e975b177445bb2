"""Training from examples: SFT, DPO and reward models, with the reading of their data."""
