"""The web page at `/dashboard`: its files, the snapshots it shows, and the stream that carries them.

`server.api.dashboard` has its routes. Everything that the page shows or does beside goes through the routes that any
client has.
"""
