"""How does a program become a straight line?  It is executed statement by statement, and each
assignment is written down as it stands.

    def gcd(a, b):                a = 12
        while b:                  b = 8
            a, b = b, a % b       a, b = b, a % b
        return a                  a, b = b, a % b
                                  assert (a) == 4

Control flow is followed and not written. A `for` loop becomes forloop0 = iter(...), and
v = next(forloop0) in each round. A condition, or a line that is only an expression, is written if
it alters something, as `stack.pop()` does. A call of a function of the same file is unrolled, and
so is a recursion: the second call of gcd has the variables gcd1_a, gcd1_b and the result gcd1.

Law: a line is executed as it is written, in the namespace of the lines before it.

Refused, with FILE:LINE: import, lambda, class, try, with, raise, yield, a function in a function,
built-in functions not in USABLE. So values have built-in types, and ALTERING is complete.

Source: "Grounding code understanding in step-by-step execution", section 2.

Next: sessions.py.
"""

import ast
import builtins
import contextlib
import copy
import inspect
import itertools
from typing import NamedTuple

STEPS = 20_000  # statements that a program may execute
STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Expr, ast.If, ast.For,
              ast.While, ast.Break, ast.Continue, ast.Return, ast.Pass, ast.Assert)
REFUSED_EXPRESSIONS = ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await
# A call inside one of these is executed sometimes, or often, or in an order of its own.
NO_PLACE_FOR_CALLS = (ast.BoolOp, ast.IfExp, ast.Dict, ast.NamedExpr, ast.GeneratorExp,
                      ast.ListComp, ast.SetComp, ast.DictComp, ast.JoinedStr)
USABLE = {name: getattr(builtins, name) for name in """abs all any ascii bin bool bytearray bytes
    chr complex dict divmod enumerate filter float format frozenset hex int isinstance iter len list
    map max min next oct ord pow range repr reversed round set slice sorted str sum tuple
    zip""".split()}
ALTERING = set("""add append clear difference_update discard extend insert intersection_update pop
    popitem remove reverse setdefault sort symmetric_difference_update update""".split())


class Refused(ValueError):
    """What cannot be unrolled, or cannot be followed. The message begins with FILE:LINE."""


class Frame(NamedTuple):
    """A function that is being executed: its variables, and what is put before their names."""
    prefix: str
    variables: set


def names_in(node, *contexts):
    return {part.id for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, contexts)}


class Lift(ast.NodeTransformer):
    """Puts the result in place of each call of a function of the file, in an expression.

    What Python computes before such a call is kept in a variable: the call may alter it.
    """

    def __init__(self, unroller, node):
        self.unroller, self.to_come = unroller, len(unroller.calls(node))

    def visit(self, node):
        calls = self.unroller.calls(node)
        if calls and (isinstance(node, NO_PLACE_FOR_CALLS) or len(getattr(node, "ops", ())) > 1):
            self.unroller.alone(calls[0])
        self.to_come -= node in calls
        if calls or isinstance(node, (ast.Starred, ast.keyword)):
            node = self.generic_visit(node)
        if node in calls:
            return self.unroller.call(node)
        fixed = node.value if isinstance(node, ast.Attribute) else node
        if self.to_come and isinstance(node, ast.expr) and not isinstance(
                fixed, (ast.Name, ast.Constant, ast.Starred)):
            kept = self.unroller.fresh("kept")
            self.unroller.run(f"{kept} = {ast.unparse(node)}")
            return ast.Name(kept, ast.Load())
        return node


class Unroller:
    """Executes statements of a file one by one. `lines` is the straight line so far, `space` the
    namespace in which it was executed. Raises: Refused if the source is no Python.
    """

    def __init__(self, source, file, steps=STEPS):
        self.file, self.limit, self.steps, self.line, self.lines = file, steps, 0, 1, []
        self.space = {"__builtins__": USABLE | {"print": lambda *_, **__: None},
                      "__name__": "__main__"}
        self.variables_of, self.numbers, self.texts = {}, {}, {}
        try:
            self.tree = ast.parse(source)
            compile(source, file, "exec")  # finds a `return` outside a function; executes nothing
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, told = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
            raise Refused(f"{file}:{line}: {type(error).__name__}: {told}") from None
        self.rows = source.encode().split(b"\n")
        self.functions = {node.name: node for node in self.tree.body
                          if isinstance(node, ast.FunctionDef)}
        self.stored = names_in(self.tree, ast.Store) | {*self.functions} | {
            part.arg for part in ast.walk(self.tree) if isinstance(part, ast.arg)}

    def refuse(self, node, why):
        raise Refused(f"{self.file}:{node.lineno}: {why}")

    @contextlib.contextmanager
    def naming_the_line(self):
        """Whatever the program raises is told in one line."""
        try:
            yield
        except Refused:
            raise
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise Refused(f"{self.file}:{self.line}: {told}") from None

    # --- Before anything is executed --------------------------------------------------------------

    def check(self, nodes):
        """Refuses what a straight line cannot say."""
        known = {*self.stored, *self.space, *self.space["__builtins__"]}
        for part in (part for node in nodes for part in ast.walk(node)):
            word = None
            if isinstance(part, (ast.stmt, *REFUSED_EXPRESSIONS)) and not isinstance(
                    part, STATEMENTS):
                word = ast.unparse(part).strip("(\n").split()[0].rstrip(":")
            if isinstance(part, ast.Attribute) and part.attr.startswith("__"):
                word = part.attr
            if isinstance(part, ast.Name) and part.id not in known and hasattr(builtins, part.id):
                word = part.id
            if word:
                self.refuse(part, f"`{word}` cannot be unrolled")

    def enter(self, function, prefix):
        """The frame of a call."""
        name, given = function.name, function.args
        if name not in self.variables_of:
            if (given.vararg or given.kwarg or given.kwonlyargs or function.decorator_list or not
                    all(isinstance(x, (ast.Constant, ast.UnaryOp)) for x in given.defaults)):
                self.refuse(function, f"{name} has a decorator, *, ** or a default that is no "
                                      "constant")
            self.check(function.body)
            self.variables_of[name] = names_in(function, ast.Store, ast.Del) | {
                argument.arg for argument in given.posonlyargs + given.args}
        return Frame(prefix, self.variables_of[name])

    # --- Execution --------------------------------------------------------------------------------

    def run(self, text):
        """Executes a line and, if it did not fail, writes it down."""
        exec(text, self.space)
        self.lines.append(text)

    def block(self, nodes, frame):
        """Executes statements up to one that leaves the block; returns that one, or None."""
        for node in nodes:
            if left := self.statement(node, frame):
                return left

    def statement(self, node, frame):
        self.line, self.steps = node.lineno, self.steps + 1
        if self.steps > self.limit:
            self.refuse(node, f"still running after {self.limit:,} statements")
        match node:
            case ast.Break() | ast.Continue() | ast.Return():
                return node
            case ast.If():
                return self.block(node.body if self.holds(node.test, frame) else node.orelse, frame)
            case ast.For() | ast.While():
                for _ in self.rounds(node, frame):
                    left = self.block(node.body, frame)
                    if isinstance(left, ast.Return):
                        return left
                    if isinstance(left, ast.Break):
                        return None
                return self.block(node.orelse, frame)
            case ast.Assert():
                if not self.holds(node.test, frame):
                    self.refuse(node, "the assertion fails")
            case ast.Expr():
                self.value(node.value, frame)
            case ast.Assign() | ast.AugAssign() | ast.Delete() | ast.AnnAssign(value=ast.expr()):
                self.run(self.written(node, frame))
                self.executed(node, frame)

    def rounds(self, node, frame):
        """Yields once for each round of a loop."""
        if isinstance(node, ast.While):
            while self.holds(node.test, frame):
                yield
            return
        if calls := self.calls(node.target):
            self.alone(calls[0])
        loop = self.fresh("forloop")
        self.run(f"{loop} = iter({self.written(node.iter, frame)})")
        while True:
            self.line = node.lineno
            try:
                self.run(f"{self.written(node.target, frame)} = next({loop})")
            except StopIteration:
                return
            self.executed(node.target, frame)
            yield

    def holds(self, test, frame):
        """Whether a condition holds. `and`, `or` and `not` are followed operand by operand."""
        match test:
            case ast.BoolOp():
                deciding = isinstance(test.op, ast.Or)
                return deciding == any(self.holds(part, frame) == deciding for part in test.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self.holds(test.operand, frame)
        return bool(self.value(test, frame))

    def value(self, node, frame):
        """The value of an expression, which is written down only if it alters something."""
        self.line, text = node.lineno, self.written(node, frame)
        text = f"({text})" if isinstance(node, ast.NamedExpr) else text
        alters = any(isinstance(part, ast.NamedExpr)
                     or isinstance(part, ast.Attribute) and part.attr in ALTERING
                     # Whoever reads an iterator uses it up: next(x), list(x), 3 in x.
                     or isinstance(part, ast.Name) and hasattr(self.space.get(part.id), "__next__")
                     for part in ast.walk(ast.parse(text)))
        value = eval(text, self.space)
        self.lines += [text] * alters
        self.executed(node, frame)
        return value

    def executed(self, node, frame):
        """Called after each statement and each condition; for a chapter that listens."""

    # --- The text of a line, and the functions that it calls --------------------------------------

    def fresh(self, stem):
        """stem0, stem1, ...: a name that no name of the file begins with."""
        for number in itertools.count(self.numbers.get(stem, 0)):
            if not any(name.startswith(f"{stem}{number}") for name in self.stored):
                self.numbers[stem] = number + 1
                return f"{stem}{number}"

    def written(self, node, frame):
        """The text of a node, with prefixes, after the calls in it have been unrolled."""
        calls, key = self.calls(node), (node, frame.prefix)
        if key in self.texts and not calls:
            return self.texts[key]
        if (not frame.prefix and not calls and node.lineno == node.end_lineno
                and not isinstance(node, ast.Tuple)):
            return self.rows[node.lineno - 1][node.col_offset:node.end_col_offset].decode()
        node = copy.deepcopy(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in frame.variables:
                part.id = frame.prefix + part.id
        if calls and isinstance(node, ast.stmt):
            value, target = getattr(node, "value", None), getattr(node, "target", ast.Name())
            if value is None or len(self.calls(value)) < len(calls) or not isinstance(
                    target, ast.Name):
                self.alone(calls[0])
            node.value = Lift(self, value).visit(value)
        elif calls:
            node = Lift(self, node).visit(node)
        self.texts[key] = ast.unparse(node)
        return self.texts[key]

    def alone(self, call):
        self.refuse(call, f"{call.func.id}() must be called in a line of its own")

    def calls(self, node):
        """The calls of functions of the file."""
        return [part for part in ast.walk(node) if isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name) and part.func.id in self.functions]

    def call(self, call):
        """Unrolls a call of a function of the file; what stands for its result."""
        function = self.functions[call.func.id]
        result = self.fresh(function.name)
        frame = self.enter(function, f"{result}_")
        names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
        defaults = dict(zip(names[::-1], function.args.defaults[::-1]))
        given = inspect.Signature([
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD,
                              default=defaults.get(name, inspect.Parameter.empty))
            for name in names]).bind(*call.args, **{word.arg: word.value for word in call.keywords})
        given.apply_defaults()
        for name, value in given.arguments.items():
            self.run(f"{frame.prefix}{name} = {ast.unparse(value)}")
        left = self.block(function.body, frame)
        if left is None or left.value is None:
            return ast.Constant(None)
        self.line = left.lineno
        self.run(f"{result} = {self.written(left.value, frame)}")
        return ast.Name(result, ast.Load())
