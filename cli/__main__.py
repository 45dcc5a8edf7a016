"""`python -m partc.cli` is `partc`."""

from partc.cli.main import main

main()
