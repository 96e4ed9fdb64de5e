"""`python -m specdec`."""

from specdec.command import main

main()
