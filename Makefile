# One-line targets; everything that needs more is in .ci/ or in the packages. `make` alone lists them.
