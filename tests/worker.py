"""The process in which a submission runs. It returns values, and no verdict.

tests/exercises.py starts it in a copy with the submission's files. Questions come in as JSON, on
stdin: a few lines of code, and the names of the values to send back. Each is answered by one line
of JSON, with these values or with an error. A submission that ends this process early, or prints
what it likes, has shown nothing. course.py calls run, too: what is expected is the project's own
answer.
"""

import json
import os
import sys
import traceback


def take_apart(value):
    """A value as (what it is, in words; all numbers in it). JSON can write both."""
    if isinstance(value, dict):
        keys = sorted(value)
        kind, numbers = take_apart([value[key] for key in keys])
        return f"a dict with the keys {keys} and the items {kind}", numbers

    if isinstance(value, (list, tuple)):
        kinds = []
        numbers = []
        for item in value:
            kind, some = take_apart(item)
            kinds.append(kind)
            numbers += some
        return f"[{', '.join(kinds)}]", numbers

    library = type(value).__module__.split(".")[0]
    if library in ("numpy", "torch") and hasattr(value, "tolist"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{library} {dtype} {[*value.shape]}", value.reshape(-1).tolist()
    if isinstance(value, (bool, int, float)):
        return type(value).__name__, [value]
    return repr(value) if isinstance(value, str) else type(value).__name__, []


def run(code, names):
    """The values of these names, after the code has run."""
    variables = {}
    exec(code, variables)
    return {name: take_apart(variables[name]) for name in names}


def main():
    # The answers leave through a descriptor of their own; print goes to stderr from here on.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    folder = os.getcwd()
    sys.path[:1] = [folder, os.path.join(folder, "tests", "experiments")]
    for question in json.load(sys.stdin):
        try:
            answer = {"values": run(**question)}
        except BaseException:  # sys.exit() in a submission is an error as any other
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
