"""``python -m headwise``: the command line."""

from headwise.cli import main

if __name__ == "__main__":
    main()
