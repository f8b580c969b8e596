"""How the judge and the program talk: plain values are copied, other objects stay where they are.

Both sides run one `Peer` over two pipes. A message is its length in 8 bytes and JSON. One side asks
(`call` a function, `get` an attribute, ...), the other answers with a value or an error; while it
waits it serves what the other asks, so that a test may hand over a function.

A plain value (a number, text, list, dictionary, date and the like) arrives as a fresh object of the
exact builtin type: a subclass that equals everything arrives as what it is without its methods. Any
other object arrives as a `Far`, a name for it; what is done with a `Far` is asked of its owner.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import os
import types

PLAIN = (type(None), bool, str)
# type -> (tag, how its text is made, how it is read)
TEXTS = {
    int: ("int", hex, lambda text: int(text, 16)),
    float: ("float", float.hex, float.fromhex),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    complex: ("complex", repr, complex),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    fractions.Fraction: ("fraction", str, fractions.Fraction),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.isoformat, datetime.time.fromisoformat),
}
LISTS = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
READ_TEXT = {tag: read for tag, _, read in TEXTS.values()}
READ_LIST = {tag: kind for kind, tag in LISTS.items()}
ERRORS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception)
}
CHANGING = (list, dict, set, bytearray, collections.deque)


class Far:
    """An object that lives with the other side. Nothing plain equals it."""

    __slots__ = ("_peer", "_number")

    def __init__(self, peer, number):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *words, **named):
        return self._peer.ask("call", self, words, named)

    def __getattr__(self, name):
        return self._peer.ask("get", self, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self, name, value)

    def __eq__(self, other):
        return isinstance(other, Far) and self._peer.ask("equal", self, other) is True

    def __hash__(self):
        return hash(self._number)

    def __iter__(self):
        return Far(self._peer, self._peer.ask("iterate", self)._number)

    def __next__(self):
        found = self._peer.ask("next", self)
        if not found:
            raise StopIteration
        return found[0]

    def __instancecheck__(self, other):
        return self._peer.ask("is instance", other, self) is True


def _operator(name):
    def operator(self, *others):
        return self._peer.ask("operator", self, name, others)

    return operator


OPERATORS = (
    "__getitem__ __setitem__ __delitem__ __contains__ __len__ __str__ __repr__ __bool__ __int__"
    " __float__ __index__ __abs__ __neg__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"
    " __truediv__ __floordiv__ __mod__ __pow__ __and__ __or__ __xor__ __lt__ __le__ __gt__ __ge__"
    " __enter__ __exit__"
).split()
for _name in OPERATORS:
    setattr(Far, _name, _operator(_name))


class Peer:
    """One side; `ask` asks the other, `serve` answers until the other has gone."""

    def __init__(self, source, sink):
        self.source, self.sink = source, sink
        self.objects = {}  # number -> what the other side knows by it
        self.classes = {}  # number -> our stand-in for an exception class of the other side

    def ask(self, what, *arguments):
        """The other side's answer; its error is raised here."""
        self._send(["ask", what, [self.encode(argument) for argument in arguments]])
        while True:
            kind, *rest = self._receive()
            if kind == "ask":
                self._answer(*rest)
            elif kind == "error":
                raise self._error(*rest)
            else:
                value, changed = rest
                self._apply(arguments, changed)
                return self.decode(value)

    def serve(self):
        """Answer everything that is asked."""
        while True:
            kind, *rest = self._receive()
            if kind == "ask":
                self._answer(*rest)

    def _answer(self, what, arguments):
        try:
            given = [self.decode(argument) for argument in arguments]
            value = self._do(what, given)
            changed = self._changed(given, arguments) if what == "call" else []
            message = ["value", self.encode(value), changed]
        except Exception as error:
            kind = type(error)
            name = next(base.__name__ for base in kind.__mro__ if ERRORS.get(base.__name__) is base)
            number = None if ERRORS.get(kind.__name__) is kind else self._known(kind)
            message = ["error", name, number, kind.__name__, str(error)]
        self._send(message)

    def _do(self, what, given):
        thing, *rest = given
        if what == "names":
            names = vars(self.module)
            return {name: names[name] for name in thing if name in names}
        if what == "call":
            return thing(*rest[0], **rest[1])
        if what == "get":
            return getattr(thing, rest[0])
        if what == "set":
            return setattr(thing, *rest)
        if what == "equal":
            return bool(thing == rest[0])
        if what == "iterate":
            return Kept(iter(thing))
        if what == "next":
            return [value for value in [next(thing, self)] if value is not self]
        if what == "is instance":
            return isinstance(thing, rest[0])
        if what == "operator" and rest[0] in OPERATORS:
            others = rest[1]
            if rest[0] in ("__bool__", "__len__", "__str__", "__repr__", "__contains__"):
                plain = {"__bool__": bool, "__len__": len, "__str__": str, "__repr__": repr}
                made = plain.get(rest[0])
                return made(thing) if made else others[0] in thing
            return getattr(thing, rest[0])(*others)
        raise ValueError(f"nobody answers {what!r}")

    def _changed(self, given, arguments):
        """[place, value] of every argument that a call has changed in place."""
        found = []
        for place, value in enumerate(given[1]):
            if type(value) in CHANGING:
                now = self.encode(value)
                if now != arguments[1][1][place]:
                    found.append([place, now])
        return found

    def _apply(self, arguments, changed):
        for place, value in changed:
            mine, now = arguments[1][place], self.decode(value)
            if type(mine) in CHANGING and type(mine) is type(now):
                mine.clear()
                (mine.update if isinstance(mine, (dict, set)) else mine.extend)(now)

    def encode(self, value):
        """What is sent for a value: plain data as it is, anything else as a number."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is Far:
            return ["yours", value._number]
        if kind is Kept:
            return ["far", self._known(value.object)]
        for known, (tag, write, _) in TEXTS.items():
            if isinstance(value, known):
                return [tag, write(value if kind is known else _bare(known, value))]
        for known, tag in LISTS.items():
            if isinstance(value, known):
                return [tag, [self.encode(item) for item in known.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, range):
            return ["range", [self.encode(part) for part in (value.start, value.stop, value.step)]]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, Exception):
            return self._encode_error_class(value)
        return ["far", self._known(value)]

    def _encode_error_class(self, kind):
        if ERRORS.get(kind.__name__) is kind:
            return ["builtin error", kind.__name__]
        base = next(each.__name__ for each in kind.__mro__ if ERRORS.get(each.__name__) is each)
        return ["error class", self._known(kind), kind.__name__, base]

    def decode(self, sent):
        """The value that was sent; ValueError or the like if it is no message of ours."""
        if type(sent) in PLAIN:
            return sent
        tag, content = sent[0], sent[1]
        if tag in READ_TEXT:
            return READ_TEXT[tag](content)
        if tag in READ_LIST:
            return READ_LIST[tag](self.decode(item) for item in content)
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag == "range":
            return range(*map(self.decode, content))
        if tag == "yours":
            return self.objects[content]
        if tag == "module":
            return importlib.import_module(content)
        if tag == "builtin error":
            return ERRORS[content]
        if tag == "error class":
            return self._stand_in(*sent[1:])
        if tag == "far":
            return Far(self, content)
        raise ValueError(f"{tag!r} is no kind of value")

    def _known(self, value):
        number = id(value)
        self.objects[number] = value
        return number

    def _stand_in(self, number, name, base):
        if number not in self.classes:
            self.classes[number] = type(name, (ERRORS[base],), {})
        return self.classes[number]

    def _error(self, base, number, name, text):
        kind = ERRORS[base] if number is None else self._stand_in(number, name, base)
        try:
            return kind(text)
        except TypeError:  # some builtin errors need more than a text
            return Exception(text)

    def _send(self, message):
        data = json.dumps(message).encode()
        data = memoryview(len(data).to_bytes(8, "big") + data)
        while data:
            data = data[os.write(self.sink, data) :]

    def _receive(self):
        size = int.from_bytes(self._read(8), "big")
        return json.loads(self._read(size))

    def _read(self, size):
        data = bytearray()
        while len(data) < size:
            piece = os.read(self.source, min(size - len(data), 1 << 20))
            if not piece:
                raise Gone
            data += piece
        return bytes(data)


class Kept:
    """An object that goes over as a `Far` even if it could be copied."""

    def __init__(self, object):
        self.object = object


class Gone(BaseException):
    """The other side has ended."""


def _bare(kind, value):
    """The value of a subclass as its builtin class has it."""
    if kind is int:
        return int.__index__(value)
    if kind is float:
        return float.__float__(value)
    return kind.__new__(kind, value) if kind in (bytes, bytearray, complex) else value
