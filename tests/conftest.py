"""Fixtures shared by several packages' tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
