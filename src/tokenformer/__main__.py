"""`python -m tokenformer` is the `tokenformer` command."""

from .cli import main

if __name__ == "__main__":
    main()
