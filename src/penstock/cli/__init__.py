"""
The `penstock` command. Verbs are loaded when they are called, so that `penstock ls` does not pay for
`penstock top`.
"""
