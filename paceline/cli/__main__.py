"""`python -m paceline.cli`, the same as the `paceline` script."""

from paceline.cli import main

main()
