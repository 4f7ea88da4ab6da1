"""`python -m fwzoo`, and so `torchrun -m fwzoo train ...`."""

from fwzoo.cli import main

main()
