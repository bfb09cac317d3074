"""`python -m laminar_py.cli`: the command `laminar`, by this very interpreter. Started so by the launcher."""

from laminar_py.cli import main

main()
