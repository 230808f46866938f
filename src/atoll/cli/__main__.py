"""`python -m atoll.cli` is `atoll`."""

from atoll.cli.main import main

main()
