"""Training with Atropos: its API's batches become trajectories, and an environment runs beside the server. No MLX."""
