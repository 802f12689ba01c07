"""Entry point of `python -m jaxacct.train.audit`."""

from .command import main

if __name__ == "__main__":
    main()
