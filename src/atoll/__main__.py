"""`python -m atoll` is `atoll`, for a Python whose scripts are not on the PATH."""

from atoll.cli.start import main

main()
