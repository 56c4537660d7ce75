"""One module a command; `register` adds it to the command line."""
