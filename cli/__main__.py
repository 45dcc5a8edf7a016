"""`python -m partc.cli` is `partc`, and as that it imports nothing from the folder where it is started."""

import sys

if not sys.flags.safe_path:
    # python -m has put it first
    del sys.path[0]

from partc.cli.main import main

main()
