"""The other side of the HTTP API: a typed client and the SDK worker, on the standard library alone."""
