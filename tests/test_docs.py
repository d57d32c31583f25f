"""What the documents name is there: files, links, scripts, and settings of the job file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from batchinfer.job.spec import JobSpec

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "batchinfer/README.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*")),
]
# What a section of the job file may hold. A room of the code can have a section's name.
SECTIONS = {
    name: field.annotation.model_fields
    for name, field in JobSpec.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}

# `code` that is a path of the repository, maybe with arguments behind it. out/, data/ and ../ are the reader's.
_PATH = re.compile(r"`((?:tests|scripts|docs|jobs|slurm|batchinfer|kernels)/[\w./-]+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_are_there(document: str) -> None:
    named = _PATH.findall(text(document)) + [
        f"{Path(document).parent}/{link}" for link in _LINK.findall(text(document))
    ]
    missing = [path for path in named if not (ROOT / path).exists() and not (ROOT / "batchinfer" / path).exists()]
    assert named
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_and_modules_are_there(document: str) -> None:
    found = re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)[`:]", text(document))
    assert not [
        f"{section}.{name}"
        for section, name in found
        if name not in SECTIONS[section] and not list((ROOT / "batchinfer" / section).glob(f"{name}*"))
    ]


def test_guarantees_name_a_proof_for_each_promise() -> None:
    rows = re.findall(r"^\| \d+ \|.*\|$", text("docs/guarantees.md"), re.MULTILINE)
    assert len(rows) >= 9
    assert all(re.search(r"`(tests|scripts)/", row.rsplit("|", 2)[1]) for row in rows)
