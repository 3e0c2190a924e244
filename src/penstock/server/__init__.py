"""
The scheduler over HTTP. `routes` is the table of the API, `app` serves it, `listener` listens.

Nothing is imported here, so that importing one module does not import the whole server.
"""
