"""
The scheduler over HTTP: `routes` is the table of the API, `app` serves it, `listener` accepts connections.

This file imports nothing, so that importing one module does not import the whole server.
"""
