"""Small programs to read, run and import from the root of the repository."""
