"""docs/map.md names every module, and everything it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("jitllm", "actors", "examples")
ENTRY = re.compile(r"^ *- `([^`]+)`", re.MULTILINE)  # a file, a folder ending in /, or a pattern


def entries() -> list[str]:
    return ENTRY.findall((ROOT / "docs" / "map.md").read_text())


def files_of(entry: str) -> set[Path]:
    """The files that an entry names; a folder stands for its `__init__.py`, if it has one."""
    found = set(ROOT.glob(entry.rstrip("/")))
    return {path / "__init__.py" if path.is_dir() else path for path in found}


def test_every_module_is_on_the_map() -> None:
    modules = {path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")}
    assert len(modules) > 5
    missing = modules - {path for entry in entries() for path in files_of(entry)}
    assert sorted(str(path.relative_to(ROOT)) for path in missing) == []


def test_everything_on_the_map_exists() -> None:
    assert [entry for entry in entries() if not files_of(entry)] == []
    assert [entry for entry in entries() if entry.endswith("/") and not _is_folder(entry)] == []


def _is_folder(entry: str) -> bool:
    return all(path.is_dir() for path in ROOT.glob(entry.rstrip("/")))


def test_nothing_is_on_the_map_twice() -> None:
    names = entries()
    assert sorted(names) == sorted(set(names))
