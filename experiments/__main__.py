"""The chapters and their questions, in README's order: python -m experiments"""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")

print("Each chapter is run as python -m experiments.NAME")
for shelf, name in re.findall(r"^\| (?:\*\*(.+)\*\*|`(\w+)`) \| ", README, re.MULTILINE):
    if shelf:
        print(f"\n{shelf}")
    else:
        source = (HERE / f"{name}.py").read_text(encoding="utf-8")
        question, mark, _ = ast.get_docstring(ast.parse(source)).partition("?")
        print(f"    {name:12} {question}{mark}")
