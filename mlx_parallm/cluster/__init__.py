"""Past one process: replicas of the server on Ray Serve, and one model over several machines."""
