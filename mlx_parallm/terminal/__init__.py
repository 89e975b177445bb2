"""Commands for people at a terminal: models, top, connect, launch, pull, recommend, completion."""
