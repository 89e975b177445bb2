"""The HTTP server: the process, its routes as data, bodies, errors and middleware."""
