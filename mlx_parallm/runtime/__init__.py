"""How a process comes up, and the client through which the server sees what runs."""
