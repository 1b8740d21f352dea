"""What is stored can be used again: a model of README's table, and a record."""

import json
import shutil
import subprocess

import eval as evaluation
import pytest
from conftest import ROOT


def test_a_model_of_the_table_reads_fresh_traces_without_an_error(capsys):
    evaluation.main([str(ROOT / "experiments/results/models/linrnn-S5-seed0"), "--lengths", "64:8",
                     "--traces", "32", "--device", "cpu", "--json"])
    row, = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert row["reveals"] == 32 * 8 and row["all"] == row["perfect"] == 1


@pytest.mark.skipif(not shutil.which("git"), reason="without git a record names no commit")
def test_a_record_names_the_commit_and_only_changed_code_makes_it_dirty(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.__file__", str(tmp_path / "code.py"))
    code, record, commits = tmp_path / "code.py", tmp_path / "records.jsonl", []
    code.touch()
    record.touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for ask in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *ask], check=True)
    for change in ("", "", "# changed\n"):  # at the second, the file of records has changed
        code.write_text(change)
        evaluation.append_record(record, "python train.py", {})
        commits.append(json.loads(record.read_text().splitlines()[-1])["commit"])
    assert len(commits[0]) >= 7 and commits[1:] == [commits[0], f"{commits[0]}-dirty"]
