"""The chapters and their questions: python -m experiments"""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")

print("Each chapter is run as python -m experiments.NAME\n")
for name in re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE):
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    question, mark, _ = ast.get_docstring(ast.parse(source)).partition("?")
    print(f"{name:12} {question}{mark}")
