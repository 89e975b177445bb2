"""LoRA adapters: their files, names and versions, and the layers that add them row by row."""
