"""The engine: one thread that owns a model and everything MLX, and its face for callers on other threads."""
