"""Entry point of the `tokenmill` command: handles Ctrl-C before anything slow is imported."""

from tokenmill.cli.interrupt import guard


def main() -> None:
    """Run the command; the entry point `tokenmill`."""
    guard()
    from tokenmill.cli.main import main

    main()


if __name__ == "__main__":
    main()
