"""`python -m atoll.cli` is `atoll`."""

from atoll.cli.start import main

main()
