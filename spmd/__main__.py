"""``python -m spmd``: see ``command.py``."""

from .cli.command import main

if __name__ == "__main__":
    main()
