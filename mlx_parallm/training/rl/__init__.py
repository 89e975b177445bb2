"""Policies that learn from rewards: rollouts, trajectories, objectives, updates and their sessions."""
