"""Reading a program out of an answer.

A reference is Python source that an answer must survive. If it holds the line HERE, what stands
above comes before the answer: the head of the function that HumanEval's answers continue.

Of an answer the block counts that defines what the tests call; of several the last one. Blocks are
fenced, stand between [BEGIN] and [DONE], are inline code, or are the bare text up to a closing
fence or to [DONE]. Definitions and imports of earlier blocks are put before it if it needs them.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings

from .final_number import OPENED, THINKING

HERE = "\n# The answer stands here.\n"
FENCE = re.compile(r"(`{3,}|~{3,})[^\n`]*\n(.*?)(?:\n[ \t]*\1|\Z)", re.DOTALL)
BEGIN = re.compile(r"\[BEGIN\]\n?(.*?)(?:\[DONE\]|\Z)", re.DOTALL)
BARE_END = re.compile(r"\n[ \t]*(?:```|~~~)|\[DONE\]|\[/?(?:BEGIN|PYTHON)\]")
INLINE = re.compile(r"(?<!`)`([^`\n]*\b(?:def|lambda|class)\b[^`\n]*)`(?!`)")
SPECIAL = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|<(?:eos|bos|end_of_turn)>")
MARGIN = re.compile(r"^(?=\S)", re.MULTILINE)
CODE = re.compile(r"^(?:def|async def|class|import|from|@\w|[A-Za-z_]\w* *=)", re.MULTILINE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
MOST_CUTS = 200  # lines at the margin that are tried as the end of a program


def program(text: str, reference: str) -> tuple[str, str]:
    """(program, tests) of an answer; the program may be no Python, it then fails its tests."""
    head, _, tests = reference.rpartition(HERE)
    tests = _helpers(head) + tests
    text = OPENED.sub("", THINKING.sub("", text.replace("\r\n", "\n")))
    text = SPECIAL.sub("", text)
    wanted = _called(tests)
    codes, others = _codes(text)
    whole = [found for code in codes if (found := _defining(code, wanted))]
    whole = whole or [found for code in others if (found := _defining(code, wanted))]
    codes = codes + others
    if whole:
        chosen = _with_helpers(whole[-1], codes)
        return (f"{head}    pass\n\n\n{chosen}" if head else chosen), tests
    if not head:
        return codes[0], tests
    continued = [found for code in codes if (found := _continued(head, code))]
    return continued[0] if continued else head + codes[0], tests


def testable(reference: str) -> bool:
    """Whether the tests are Python; others would score every answer 0."""
    return _parsed(reference.rpartition(HERE)[2]) is not None


def _helpers(head: str) -> str:
    """What a head defines before the function that the answer continues; tests may use it.

    The tests get it from the reference, so that a program cannot put its own in its place.
    """
    tree = _parsed(f"{head}    pass\n") if head else None
    return "".join(f"{ast.unparse(node)}\n" for node in tree.body[:-1]) if tree else ""


def _codes(text: str) -> tuple[list[str], list[str]]:
    """Marked blocks in the order of the answer; and the bare text with inline code."""
    marked = [match.group(2) for match in FENCE.finditer(text)]
    marked = marked or [match.group(1) for match in BEGIN.finditer(text)]
    bare = BARE_END.split(text)[0]
    inline = INLINE.findall(text)
    blocks = [code for each in marked if (code := BARE_END.split(each)[0]).strip()]
    return blocks, [bare, *inline]


def _defining(code: str, wanted: set[str]) -> str:
    """The longest beginning of `code` that is Python and defines all `wanted`; "" if there is none.

    Words around bare code are left out.
    """
    if not wanted:
        return code if _parsed(code) is not None else ""
    first = CODE.search(code)
    for start in dict.fromkeys([0, first.start() if first else 0]):
        rest = textwrap.dedent(code[start:])
        ends = [len(rest), *(match.start() for match in MARGIN.finditer(rest))][: 1 + MOST_CUTS]
        for end in [ends[0], *reversed(ends[1:])]:
            tree = _parsed(rest[:end])
            if tree is not None and wanted <= _defined(tree):
                return rest[:end]
    return ""


def _with_helpers(code: str, codes: list[str]) -> str:
    """The program behind the definitions of other blocks that it needs."""
    tree = _parsed(code)
    lacking = _loaded(tree) - _defined(tree) - set(dir(builtins))
    helpers = []
    for other in codes:
        parsed = None if other.strip() == code.strip() else _parsed(other)
        only = parsed and all(isinstance(node, DEFINITIONS) for node in parsed.body)
        if only and _defined(parsed) & lacking:
            helpers.append(other)
    return "\n\n".join([*helpers, code])


def _continued(head: str, code: str) -> str:
    """The head of a function with its body, "" if that is no Python.

    A body may have lost its first spaces or all of them.
    """
    ways = [code, re.sub(r"\A {0,3}(?=\S)", "    ", code)]
    if re.match(r"\S", code):
        ways.append(textwrap.indent(code, "    "))
    for way in ways:
        if _parsed(head + way) is not None:
            return head + way
    # A body that was cut off, or is followed by words, ends before a line at the margin.
    for match in list(MARGIN.finditer(ways[1]))[:MOST_CUTS]:
        if match.start() and _parsed(head + ways[1][: match.start()]) is not None:
            return head + ways[1][: match.start()]
    return ""


def _parsed(code: str) -> ast.Module | None:
    """The syntax tree; None if `code` is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the code is written
            compile(code, "code", "exec", dont_inherit=True)
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The last two: it is nested too deeply.
        return None


def _called(tests: str) -> set[str]:
    """Names that the tests call and do not define themselves."""
    tree = _parsed(tests)
    if tree is None:
        return set()
    called = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for name in [node.func, *node.args]
        if isinstance(name, ast.Name)
    }
    stored = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and _stores(name)}
    inner = {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg)}
    return called - stored - inner - _defined(tree) - set(dir(builtins))


def _stores(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _loaded(tree: ast.Module) -> set[str]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module defines; a name for a constant is none that tests could call."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            stored = (name for name in ast.walk(node) if isinstance(name, ast.Name))
            names |= {name.id for name in stored if _stores(name)}
    return names
