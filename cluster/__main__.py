"""`python -m cluster` is the command line, also where the `cluster` script is not on PATH."""

from cluster.cli import main

if __name__ == "__main__":
    main()
