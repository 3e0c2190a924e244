"""
The scheduler over HTTP. `wire` is what travels, `routes` is the one table, `app` serves it, `server` listens.

Nothing is imported here: a client needs `wire` alone, and must not pay for a server.
"""
