"""Memory for weights and the KV cache."""

from pathlib import Path

import pytest

from kitfox.kernels.memory import lazy_zeros

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("huge_pages", [True, False])
def test_nothing_is_taken_before_it_is_touched(huge_pages: bool) -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip("the system has no huge pages to give")
    size = 64 << 20
    before = anonymous_kib("Anonymous")
    memory = lazy_zeros(size, huge_pages=huge_pages)
    assert anonymous_kib("Anonymous") - before < size >> 11
    huge_before = anonymous_kib("AnonHugePages")
    memory.fill_(1)
    # Not all of them: the ends may not fill one, and the system may have run out.
    assert (anonymous_kib("AnonHugePages") - huge_before >= size >> 11) == huge_pages


def anonymous_kib(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
