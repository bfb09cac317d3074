"""`python -m laminar_py.cli` runs the command `laminar` with this interpreter; the launcher starts runs this
way."""

from laminar_py.cli import main

main()
