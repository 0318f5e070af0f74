"""``python -m spmd``: see ``cli/commands.py``."""

from .cli.commands import main

if __name__ == "__main__":
    main()
