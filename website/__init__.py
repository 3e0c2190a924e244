"""What `make docs` adds to the pages of docs/."""
