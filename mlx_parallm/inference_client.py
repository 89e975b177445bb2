"""`InferenceClient` by the name of its own module, as trainers import it."""

from mlx_parallm.client import InferenceClient, PublishedVersion, Sample

__all__ = ["InferenceClient", "PublishedVersion", "Sample"]
