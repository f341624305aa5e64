"""`python -m memfit` is the command `memfit`."""

from memfit.cli import main

if __name__ == "__main__":
    main()
