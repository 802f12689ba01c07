"""Entry point of `python -m train.audit`."""

from .command import main

if __name__ == "__main__":
    main()
