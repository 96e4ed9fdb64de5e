"""`python -m specdec`."""

from specdec.command.entry import main

main()
