"""The config that `laminar init` writes, from choices of a user or from a file of TRL or verl."""
