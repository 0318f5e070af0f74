"""``python -m spmd``: see ``command.py``."""

from .cli.commands import main

if __name__ == "__main__":
    main()
