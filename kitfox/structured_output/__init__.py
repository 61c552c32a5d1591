"""Grammars: what an answer may still become, token by token. Two backends, llguidance and xgrammar."""
