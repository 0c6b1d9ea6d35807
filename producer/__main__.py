"""The `tokenmill` command as a process: it is ready for Ctrl-C before anything slow is imported."""

from producer.interrupt import guard


def main() -> None:
    """The entry point `tokenmill`."""
    guard()
    from producer.cli import main

    main()


if __name__ == "__main__":
    main()
