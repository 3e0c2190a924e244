"""
Workers on a Ray cluster, the third kind besides processes and threads. Imported only when a pool needs it.
"""
