"""GGUF files: header.py reads one, architectures.py says what is in it, convert.py makes an mlx-lm folder of it."""
