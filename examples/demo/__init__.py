"""
`python -m examples.demo`: a photo lab of three worker pools under load, live in the terminal.

It is a program like a user's own, built on the public names alone, and it does what it says: the workers compute, the
`kill -9` kills, and the numbers at the end are counted from what the hooks were told.
"""
