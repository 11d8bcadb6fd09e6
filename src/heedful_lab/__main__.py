"""`heedful`, and `python -m heedful_lab`."""

import sys


def main() -> None:
    """Run the command line, or say what it needs: a plain install of heedful does not include
    that."""
    try:
        from heedful_lab.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("heedful"):
            raise
        sys.exit(f"heedful: the command line needs {error.name}: pip install 'heedful[cli]'")
    run()


if __name__ == "__main__":
    main()
