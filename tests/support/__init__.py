"""What several kinds of tests, and the benchmarks, share."""
