"""`parallm doctor`: what this machine is, whether it computes right, and how fast it is."""
