"""The load test behind `parallm bench`."""
