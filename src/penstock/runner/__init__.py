"""Commands and functions that the scheduler runs itself, in processes of their own."""
