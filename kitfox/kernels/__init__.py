"""One function per op; `reference` is the definition of each."""
