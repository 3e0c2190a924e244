"""
The `penstock` command. Each verb is imported when it is called, so that `penstock ls` does not wait for the
imports of `penstock top`.
"""
