"""What the documents name exists: functions, files, links, commands and trace events."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kitfox.config import CacheConfig
from kitfox.kv_cache.manager import make_kv_cache_manager
from kitfox.request import EngineRequest, Request, SamplingParams
from kitfox.step import BlockCopy

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
REQUEST_PATH = ROOT / "docs" / "request-path.md"

# `engine/core.py:EngineCore.step`, `kitfox/plan.py:make_plan`, `tests/test_docs.py`
CODE_PLACE = re.compile(r"`(?P<file>[\w./-]+\.py)(?::(?P<name>[A-Za-z_][\w.]*))?`")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
EVENT = re.compile(r"\bevent\s+`(?P<name>\w+)`", re.IGNORECASE)

page_of_each = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def source_of(file: str) -> Path | None:
    """A file named from the repository's root, or as inside the package."""
    candidates = [ROOT / file, ROOT / "kitfox" / file]
    return next((path for path in candidates if path.is_file()), None)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Every class, function and method of a module and its module-level and class-level names, dotted."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                names.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


def emitted_events() -> set[str]:
    """The names that any `tracer.emit("name", ...)`, or `emit_each`, in the package records."""
    events = set()
    for path in (ROOT / "kitfox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Attribute(attr="emit" | "emit_each"), [ast.Constant(name), *_]):
                    events.add(name)
    return events


@page_of_each
def test_every_named_place_in_the_code_exists(page: Path) -> None:
    missing = []
    for match in CODE_PLACE.finditer(page.read_text(encoding="utf-8")):
        path = source_of(match["file"])
        if path is None or (match["name"] and match["name"] not in names_in(path)):
            missing.append(match[0])
    assert missing == []


@page_of_each
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_every_step_of_the_request_path_names_its_place() -> None:
    steps = re.split(r"(?m)^\d+\. ", REQUEST_PATH.read_text(encoding="utf-8"))[1:]
    assert len(steps) >= 15
    nameless = [step for step in steps if not any(match["name"] for match in CODE_PLACE.finditer(step))]
    assert nameless == []


def test_the_request_path_names_exactly_the_events_that_are_emitted() -> None:
    named = {match["name"] for match in EVENT.finditer(REQUEST_PATH.read_text(encoding="utf-8"))}
    assert named == emitted_events()


def test_the_pages_name_every_supported_architecture() -> None:
    from kitfox.weights.model_config import SUPPORTED_ARCHITECTURES

    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    assert [name for name in SUPPORTED_ARCHITECTURES if name not in page] == []


def test_the_api_page_names_every_parameter() -> None:
    import msgspec

    from kitfox.server.openapi import OPERATIONS

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    kinds = {kind for row in OPERATIONS for kind in (*row.bodies, row.arguments) if kind is not None}
    names = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_the_api_page_names_every_route() -> None:
    from kitfox.server.openapi import OPERATIONS  # tests/server/test_openapi.py: these are the routes

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]+) (/[^` ]*)`", page))
    missing = [  # a path that has two methods for one thing needs to be named with one of them
        f"{row.methods} {path}"
        for row in OPERATIONS
        for path in row.paths
        if not any((method, path) in named for method in row.methods)
    ]
    assert missing == []
    there = {(method, path) for row in OPERATIONS for method in row.methods for path in row.paths}
    assert sorted(named - there) == []


@pytest.mark.parametrize(("organisation", "column"), [("paged", 1), ("radix", 2)])
def test_the_worked_example_of_the_caches_page_is_true(organisation: str, column: int) -> None:
    rows = re.findall(
        r"(?m)^\| [ABC] \| (\d+) of (\d+) \| (\d+) of (\d+) \|$", (ROOT / "docs" / "caches.md").read_text("utf-8")
    )
    claimed = [(int(row[2 * column - 2]), int(row[2 * column - 1])) for row in rows]
    kv_cache = make_kv_cache_manager(CacheConfig(organisation=organisation, block_size=4), num_blocks=16)
    system, found = list(range(100, 110)), []
    for name, prompt, answer in (
        ("A", [*system, 1, 2, 3], [50, 51, 52]),
        ("B", [*system, 7, 8], [60]),
        ("C", [*system, 1, 2, 3, 50, 51, 52, 9], []),
    ):
        params = SamplingParams(max_tokens=8)
        request = Request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params))
        match = kv_cache.match_prefix(request)
        found.append((match.num_tokens, request.num_tokens))
        allocation = kv_cache.allocate_slots(request, request.num_tokens - match.num_tokens, prefix=match)
        assert allocation is not None
        if (organisation, name) == ("radix", "B"):
            assert allocation.block_copies == [BlockCopy(src=2, dst=4, num_tokens=2)]
        request.num_computed_tokens = request.num_tokens
        kv_cache.cache_computed(request)
        request.all_token_ids += answer
        for _ in answer[1:]:  # the KV of an answer's last token is never computed
            assert kv_cache.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        kv_cache.free(request)
    assert claimed == found
