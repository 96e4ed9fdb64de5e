"""`python -m specdec`."""

from specdec.command.stages import main

main()
