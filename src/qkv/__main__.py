"""`python -m qkv` is the `qkv` command."""

from qkv.cli.main import main

if __name__ == "__main__":
    main()
