"""Start `carnelian-transcribe`, or say what it needs."""

import sys


def main() -> None:
    """Run the command line; it is an extra, so that programs which import the SDK stay light."""
    try:
        from ._cli import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("carnelian-transcribe needs typer; install it with: pip install 'carnelian-client[cli,audio]'")
    app()


if __name__ == "__main__":
    main()
