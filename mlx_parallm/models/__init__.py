"""Models: loading, the forward pass, memory, and what makes them fast on this device."""
