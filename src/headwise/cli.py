"""The command line: look, explain and mask."""

import sys

from headwise.errors import AttentionError


def main() -> None:
    """Run the command line; say which extra is missing where typer or rich is."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'headwise[cli]'")
    from headwise import commands

    try:
        commands.app()
    except AttentionError as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    main()
