"""Training with other projects: Atropos and verifiers."""
