"""The `tokenmill` command as a process: it is ready for Ctrl-C before anything slow is imported."""

from tokenmill.cli.interrupt import guard


def main() -> None:
    """The entry point `tokenmill`."""
    guard()
    from tokenmill.cli.main import main

    main()


if __name__ == "__main__":
    main()
