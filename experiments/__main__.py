"""The chapters and their questions, in README's order: python -m experiments"""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

print("python -m experiments.NAME runs a chapter, and with --help explains it\n")
for name, question in re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE):
    print(f"    {name:12} {question}")
