"""Small faults planted in the package at random, and whether the tests notice: `make mutate ARGS='--sample 400'`."""
