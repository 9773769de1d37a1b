"""`python -m paceline.cli`, where the script is not on the path."""

from paceline.cli import main

main()
