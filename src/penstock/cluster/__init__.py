"""
Workers on a Ray cluster, as a third kind beside processes and threads. Nothing here is imported before a pool
needs it.
"""
