"""The commands of the program, by theme; `flashgen.tuner.cli` puts them together."""
