"""`python -m varreg`."""

from varreg.cli import main

if __name__ == "__main__":
    main()
