"""HTTP: routes, streams, access, and the service behind all dialects."""
