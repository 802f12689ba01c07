"""`python -m jaxacct`, and the command `jaxacct`: nothing is imported before Ctrl-C can be answered."""


def main() -> None:
    """Run the command line."""
    try:
        from jaxacct import cli

        cli.main()
    except KeyboardInterrupt:
        from jaxacct._interrupted import leave

        leave("jaxacct: interrupted")


if __name__ == "__main__":
    main()
