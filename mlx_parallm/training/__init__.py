"""Training: sessions, the learner, objectives, rollouts, rewards, checkpoints."""
