"""The command line: ``headwise look``, ``headwise explain`` and ``headwise mask``."""

import sys


def main() -> None:
    """Run the command line, or say which package it lacks."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'headwise[cli]'")
    from headwise import commands

    commands.app()


if __name__ == "__main__":
    main()
