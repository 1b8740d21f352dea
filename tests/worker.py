"""The process in which a submission runs. It returns values, and no verdict.

tests/exercises.py starts it in a folder without solutions. Questions come in as JSON, on stdin: a
few lines of code, their inputs, and the names of the values to send back. Each is answered by one
line of JSON, with these values or with an error. What a submission prints goes elsewhere. So one
that ends this process early, or prints what it likes, has shown nothing. course.py calls run, too:
so what is expected is the project's own answer to the same question.
"""

import json
import os
import sys
import traceback


def to_json(value):
    """A value as JSON, with its type where JSON has none. Nothing of the value is executed."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {str(key): to_json(item) for key, item in value.items()}}

    library = type(value).__module__.split(".")[0]
    if library in ("numpy", "torch") and hasattr(value, "tolist"):
        return {"of": library, "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape), "array": value.tolist()}
    return {"other": type(value).__name__}


def from_json(value):
    """What to_json was given. numpy and torch are imported only if the value needs them."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: from_json(item) for key, item in value["dict"].items()}

    if value["of"] == "numpy":
        import numpy
        return numpy.array(value["array"], value["dtype"]).reshape(value["shape"])
    import torch
    return torch.tensor(value["array"], dtype=getattr(torch, value["dtype"])).reshape(
        value["shape"])


def run(question):
    """The values that a question asks for, after its code has run on its inputs."""
    variables = {name: from_json(value) for name, value in question["inputs"].items()}
    exec(question["code"], variables)
    return {name: to_json(variables[name]) for name in question["names"]}


def describe(error, folder):
    """An error in a line: its type, what it says, and the last place of the submission in it."""
    text = f"{type(error).__name__}: {error}".strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(folder) and frame.filename != __file__:
            return f"{text} ({os.path.relpath(frame.filename, folder)}, line {frame.lineno})"
    return text


def main():
    # The answers leave through a descriptor of their own; print goes to stderr from here on.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    folder = os.getcwd()
    sys.path[:1] = [folder, os.path.join(folder, "tests", "experiments")]
    for question in json.load(sys.stdin):
        try:
            answer = {"values": run(question)}
        except BaseException as error:  # sys.exit() in a submission is an error as any other
            answer = {"error": describe(error, folder)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
