"""`python -m openkda`: the same as the command `openkda`."""

from openkda.cli import main

main()
