"""Speculative decoding: guesses of what an answer goes on with, verified by the model several at a time."""
