"""Runs the program as ``python -m flashgen``."""

from flashgen.tuner.start import main  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    main()
