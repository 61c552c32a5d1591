"""Measuring servers over HTTP, kitfox or any other: one run, a controlled comparison, an ablation.

Imports nothing of the engine. `records` names everything that is measured; `workloads` makes requests, `client` sends
them, `metrics` judges what came back, `compare` decides between servers, `report` shows it.
"""
