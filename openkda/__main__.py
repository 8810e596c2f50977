"""`python -m openkda`: the same as the command `openkda`."""

from openkda_command import main

main()
