"""The generated page is current, and what the README names exists."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_supported_ops_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("supported_ops", ROOT / "docs" / "supported_ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.page()
    assert "| Softmax |" in text and "| AddV2 |" in text
    assert (ROOT / "docs" / "supported_ops.md").read_text() == text, "run: python docs/supported_ops.py"


def test_links_and_files_named_in_the_docs_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_environment_variables_are_documented() -> None:
    found: set[str] = set()
    for source in [*(ROOT / "tf_stitch").rglob("*.py"), *(ROOT / "custom_ops").glob("*.cc")]:
        found |= set(re.findall(r"[\"'](TF_STITCH_[A-Z_]+)[\"']", source.read_text()))
    text = (ROOT / "docs" / "usage.md").read_text()
    assert found and not [name for name in sorted(found - {"TF_STITCH_TF_VERSION"}) if name not in text]
