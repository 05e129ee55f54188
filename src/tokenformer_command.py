"""The `tokenformer` script starts here, so that it answers at once.

`import tokenformer` brings torch and transformers along, which take seconds, because it registers the models with
transformers. A command that only prints help, or refuses a typo, needs neither. The package looks whether this module
was loaded before it, and then leaves the rest to the commands, which import what they need.
"""


def main() -> None:
    """Run the command line."""
    from tokenformer.cli import main

    main()
