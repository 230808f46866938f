"""`llms.txt` and `SKILL.md`: the pages for people who work through agents; made into the wheel."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In this order; the whole of them is in SKILL.md, the others are named in llms.txt.
WHOLE = ("quickstart", "concepts", "torchrun", "diloco", "convert", "troubleshooting")
HEAD = """---
name: atoll
description: >-
  Run elastic training with atoll. Start a world of ranks on a laptop, Kubernetes, Slurm, Modal,
  SageMaker or Hugging Face Jobs, see why ranks failed, scale while it runs, and convert scripts to
  DiLoCo.
---
"""
COMMENT = re.compile(r"<!--.*?-->", re.S)


def title_and_summary(page: Path) -> tuple[str, str]:
    """The heading of a page and its first paragraph."""
    title, _, rest = COMMENT.sub("", page.read_text()).partition("\n")
    paragraphs = [p for p in rest.split("\n\n") if p.strip() and not p.lstrip().startswith("```")]
    summary = " ".join(paragraphs[0].split()) if paragraphs else ""
    return title.removeprefix("# ").strip(), summary


def llms() -> str:
    """The index for agents, as https://llmstxt.org has it."""
    lead = "Elastic, fault-tolerant training: torchrun-style ranks and DiLoCo replicas."
    lines = ["# atoll", "", f"> {lead}", "", "## Pages", ""]
    for page in sorted((ROOT / "docs").glob("*.md")):
        title, summary = title_and_summary(page)
        end = re.search(r"(?<=[.:])\s", summary)
        lines.append(f"- [{title}](docs/{page.name}): {summary[: end.start()] if end else summary}")
    return "\n".join([*lines, ""])


def skill() -> str:
    """One text that an agent can work from, with nothing else at hand."""
    parts = [_demoted(ROOT / "docs" / f"{name}.md") for name in WHOLE]
    return "\n".join([HEAD, "# atoll\n", *parts])


def _demoted(page: Path) -> str:
    """The page as a part of another: its headings are one level deeper."""
    lines, is_code = [], False
    for line in COMMENT.sub("", page.read_text()).splitlines():
        is_code ^= line.startswith("```")
        lines.append(f"#{line}" if line.startswith("#") and not is_code else line)
    return "\n".join([*lines, ""])
