"""`python -m tokenformer` is the `tokenformer` command."""

from tokenformer_cli import main

if __name__ == "__main__":
    main()
