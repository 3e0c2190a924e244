"""Ours and the peers, measured in the same run.  README.md says how to read the tables."""
