"""
`python -m examples.demo`: a photo lab of three worker pools under load, live in the terminal.

The demo uses public names only, like a user's own program. The workers really compute, `kill -9` really kills, and the
hooks of the pools count the numbers at the end.
"""
