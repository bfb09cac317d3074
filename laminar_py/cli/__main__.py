"""`python -m laminar_py.cli` runs the command `laminar` with this interpreter. The launcher starts runs so."""

from laminar_py.cli import main

main()
