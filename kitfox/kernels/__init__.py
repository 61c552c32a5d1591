"""The ops of a forward pass: `reference` defines them, `native` computes them fast; `library` needs no torch."""
