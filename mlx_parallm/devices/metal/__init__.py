"""Kernels of our own for Metal, tried against MLX's operations before they are used."""
